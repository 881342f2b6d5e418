pub mod clean;
pub mod lines;
pub mod message;
pub mod size;
pub mod trend;

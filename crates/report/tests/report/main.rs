//! Pictures against the figures that they are made from: as text, as XML and as pixels.

mod layout;
mod pixels;
mod planned;
mod sample;
mod svg;
mod terminal;
mod words;

//! The screen: all GPUs, who holds them, how that went over time, and what to look at.
//!
//! [`State`] is what is shown and answers to keys and the mouse; [`draw()`] puts it on a frame and
//! knows nothing else, so that every screen can be had from recorded samples without a terminal.
//! [`show`] runs both: samples are read by a thread of their own, because a driver may take
//! seconds, and the screen is drawn where something has changed.

mod chart;
mod draw;
mod gpu_rows;
mod process_rows;
mod run_view;
mod state;
mod terminal;

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::event;

pub use draw::draw;
pub use state::{Action, Order, State, View};
use terminal::Screen;

use crate::error::MonitorError;
use crate::sample::Sample;
use crate::source::Source;

/// How long keys are waited for before the next look at the samples.
const TICK: Duration = Duration::from_millis(200);

/// Shows samples until the user leaves, `stopped` says so, or the terminal goes away. Each sample
/// is given to `heard` first.
pub fn show(
    mut source: Box<dyn Source + Send>,
    interval: Duration,
    mut state: State,
    mut heard: impl FnMut(&Sample) -> Result<(), MonitorError>,
    stopped: impl Fn() -> bool,
) -> Result<io::Result<()>, MonitorError> {
    let (sender, samples) = mpsc::sync_channel(4);
    let (leave, left) = mpsc::channel::<()>();
    let thread = thread::Builder::new().name("samples".to_owned());
    let spawned = thread.spawn(move || {
        loop {
            let begin = Instant::now();
            let sample = source.sample();
            let is_end = !matches!(sample, Ok(Some(_)));
            if sender.send(sample).is_err() || is_end {
                return;
            }
            let rest = interval.saturating_sub(begin.elapsed());
            match left.recv_timeout(rest) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
        }
    });
    if let Err(error) = spawned {
        return Ok(Err(error));
    }
    let mut screen = match Screen::open() {
        Ok(screen) => screen,
        Err(error) => return Ok(Err(error)),
    };
    let result = loop {
        let mut is_new = false;
        while let Ok(sample) = samples.try_recv() {
            if let Some(sample) = sample? {
                heard(&sample)?;
                state.push(sample);
            }
            is_new = true;
        }
        if stopped() {
            break Ok(());
        }
        if (is_new || state.is_changed())
            && let Err(error) = screen.draw(&mut state)
        {
            break Err(error);
        }
        match event::poll(TICK) {
            Ok(false) => continue,
            Ok(true) => {}
            Err(error) => break Err(error),
        }
        let event = match event::read() {
            Ok(event) => event,
            Err(error) => break Err(error),
        };
        match state.answer(&event) {
            Action::Stay => {}
            Action::Leave => break Ok(()),
            Action::Suspend => {
                if let Err(error) = screen.suspend() {
                    break Err(error);
                }
            }
        }
    };
    drop(leave);
    Ok(result)
}

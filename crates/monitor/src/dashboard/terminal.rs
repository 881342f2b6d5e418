//! The terminal while the dashboard has it: given back however the dashboard ends.

use std::io::{self, Stdout, stdout};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{DisableMouseCapture, EnableMouseCapture};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::{State, draw};

/// The alternate screen in raw mode, until it is dropped. A panic's message comes after that, and
/// is not lost with the screen.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    pub fn open() -> io::Result<Self> {
        take()?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout()));
        if terminal.is_err() {
            give_back();
        }
        Ok(Self {
            terminal: terminal?,
        })
    }

    pub fn draw(&mut self, state: &mut State) -> io::Result<()> {
        self.terminal.draw(|frame| draw(frame, state)).map(|_| ())
    }

    /// Gives the terminal back and stops the process, as Ctrl-Z does elsewhere; takes it again
    /// when the process goes on.
    pub fn suspend(&mut self) -> io::Result<()> {
        give_back();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TSTP)?;
        take()?;
        self.terminal.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn take() -> io::Result<()> {
    enable_raw_mode()?;
    let entered = execute!(stdout(), EnterAlternateScreen, EnableMouseCapture);
    if entered.is_err() {
        give_back();
    }
    entered
}

/// Undoes all of it; each part for itself, since a terminal that is gone refuses all.
fn give_back() {
    let _ = execute!(stdout(), DisableMouseCapture, LeaveAlternateScreen);
    let _ = execute!(stdout(), ratatui::crossterm::cursor::Show);
    let _ = disable_raw_mode();
}

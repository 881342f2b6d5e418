//! `cinch generate --chat`: a conversation in the terminal, or through a pipe, line by line.

use std::io::{self, BufRead, IsTerminal, Write};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

use super::answer::{Ends, Writer};
use super::format::{ChatFormat, Speaker, Turn};
use crate::failure::unread_input;
use crate::{failure, voice};

/// Whether an answer is being written, which Ctrl-C ends instead of the program.
static ANSWERING: AtomicBool = AtomicBool::new(false);
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

pub fn talk(
    writer: &mut Writer<'_>,
    format: &dyn ChatFormat,
    system: Option<&str>,
    (max_tokens, end_tokens): (usize, &[u32]),
) -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        // A second one in the same answer means the program.
        if !ANSWERING.load(Ordering::SeqCst) || INTERRUPTED.swap(true, Ordering::SeqCst) {
            #[expect(
                clippy::exit,
                reason = "nothing is being written, or the user asked twice"
            )]
            process::exit(failure::INTERRUPTED.into());
        }
    })
    .context("cannot listen for Ctrl-C")?;
    voice::aside(format.note());
    let is_terminal = io::stdin().is_terminal();
    if is_terminal && !voice::is_quiet() {
        voice::tell("Ctrl-C ends an answer, Ctrl-D the conversation.");
    }
    let ends = Ends {
        max_tokens,
        tokens: end_tokens.to_vec(),
        texts: format.ends(),
    };
    let begun = system.map(|text| Turn {
        speaker: Speaker::System,
        text: text.to_owned(),
    });
    let mut turns: Vec<Turn> = begun.into_iter().collect();
    let mut lines = io::stdin().lock().lines();
    loop {
        if is_terminal {
            let mut out = io::stderr();
            let _ = out.write_all(b"> ").and_then(|()| out.flush());
        }
        let Some(line) = lines.next().transpose().map_err(unread_input)? else {
            break;
        };
        if line.trim().is_empty() {
            continue;
        }
        turns.push(Turn {
            speaker: Speaker::User,
            text: line,
        });
        let text = answer(writer, format, &turns, &ends)?;
        turns.push(Turn {
            speaker: Speaker::Assistant,
            text,
        });
    }
    if is_terminal {
        voice::tell("");
    }
    Ok(())
}

/// Shows the assistant's next turn as it comes, and gives it back.
fn answer(
    writer: &mut Writer<'_>,
    format: &dyn ChatFormat,
    turns: &[Turn],
    ends: &Ends,
) -> anyhow::Result<String> {
    let mut text = format.encode(turns)?;
    let mut out = io::stdout().lock();
    let mut has_begun = false;
    INTERRUPTED.store(false, Ordering::SeqCst);
    ANSWERING.store(true, Ordering::SeqCst);
    let written = writer.write(&mut text, ends, &mut |piece| {
        // A space after `Assistant:` is not the answer's.
        let piece = match has_begun {
            true => piece,
            false => piece.trim_start(),
        };
        has_begun |= !piece.is_empty();
        out.write_all(piece.as_bytes())?;
        out.flush()?;
        Ok(!INTERRUPTED.load(Ordering::SeqCst))
    });
    ANSWERING.store(false, Ordering::SeqCst);
    let written = written?;
    out.write_all(b"\n")?;
    out.flush()?;
    if !voice::is_quiet() {
        voice::tell(&format!("({})", written.speed()));
    }
    Ok(written.text.trim().to_owned())
}

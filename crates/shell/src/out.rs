//! Where the shell's text goes: standard output, buffered as the C library buffers it, and standard
//! error.
//!
//! Scripts join both streams in one pipe and compare the whole, so the order in which qemu-io's
//! text arrives there is part of its contract: commands given with `-c` leave standard output in a
//! buffer until it is full or the process ends, while the prompt flushes it.

use std::cell::RefCell;
use std::io::{self, IsTerminal};
use std::rc::Rc;

use cowslip_console::output::{self, Program};
use cowslip_filters::Breakpoints;

/// The C library's buffer for a pipe or a file.
const BLOCK_BYTES: usize = 4096;

/// The shell's streams; clones write to the same ones.
#[derive(Clone)]
pub struct Out {
    /// `None` if everything is dropped.
    program: Option<Program>,
    waiting: Rc<RefCell<String>>,
    block_bytes: usize,
    /// Breakpoints, whose notes of suspended and resumed requests are printed before the next
    /// output.
    breakpoints: Breakpoints,
}

impl Out {
    /// The streams of this process.
    pub fn new(program: &Program) -> Out {
        let block_bytes = match io::stdout().is_terminal() {
            true => 1,
            false => BLOCK_BYTES,
        };
        Out {
            program: Some(program.clone()),
            waiting: Rc::default(),
            block_bytes,
            breakpoints: Breakpoints::default(),
        }
    }

    /// Streams that nobody reads.
    pub fn nowhere() -> Out {
        Out {
            program: None,
            waiting: Rc::default(),
            block_bytes: BLOCK_BYTES,
            breakpoints: Breakpoints::default(),
        }
    }

    /// The breakpoints whose notes go here.
    pub fn breakpoints(&self) -> &Breakpoints {
        &self.breakpoints
    }

    /// Writes to standard output.
    pub fn print(&self, text: &str) {
        if self.program.is_none() {
            return;
        }
        let mut waiting = self.waiting.borrow_mut();
        waiting.push_str(&self.breakpoints.take_notes());
        waiting.push_str(text);
        if waiting.len() >= self.block_bytes {
            let mut whole = waiting.len() / self.block_bytes * self.block_bytes;
            while !waiting.is_char_boundary(whole) {
                whole -= 1;
            }
            output::print(&waiting[..whole]);
            waiting.drain(..whole);
            output::flush();
        }
    }

    /// Writes the text that is buffered, and notes of breakpoints, to standard output.
    pub fn flush(&self) {
        if self.program.is_none() {
            return;
        }
        let mut text = std::mem::take(&mut *self.waiting.borrow_mut());
        text.push_str(&self.breakpoints.take_notes());
        output::print(&text);
        output::flush();
    }

    /// Writes to standard error.
    pub fn complain(&self, text: &str) {
        if self.program.is_some() {
            output::print_error(text);
        }
    }

    /// Writes to standard error behind the program's name.
    pub fn complain_by_name(&self, text: &str) {
        if let Some(program) = &self.program {
            program.complain(text);
        }
    }
}

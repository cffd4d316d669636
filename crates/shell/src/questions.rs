//! The commands that ask what the image is like, and `truncate`.

use cowslip::image::Extent;
use cowslip_cmdline::getopt::{Name, Scanner};

use super::parse;
use super::report::{self, Held};
use super::shell::{Complaint, Outcome, Shell};

/// Extents asked for at once: enough to make the calls few, little enough to hold.
const EXTENTS_MAX: usize = 4096;
const SECTOR_BYTES: u64 = 512;

impl Shell {
    pub(super) fn length(&self) -> Outcome {
        // QEMU counts sectors.
        let size = self.image()?.size().next_multiple_of(SECTOR_BYTES);
        self.out.print(&format!("{}\n", report::size(size as f64)));
        Ok(())
    }

    pub(super) fn info(&self) -> Outcome {
        if let Some(drivers) = &self.opened()?.drivers {
            self.out.print(drivers);
            return Ok(());
        }
        let layers = self.image()?.layers();
        let header = layers.first().and_then(|layer| layer.header.clone());
        self.out.print(&match header {
            Some(header) => report::qcow2_info(&header),
            None => report::raw_info(),
        });
        Ok(())
    }

    pub(super) async fn alloc(&self, args: &[String]) -> Outcome {
        let offset = parse::size(&args[0]).map_err(Complaint::Said)?;
        let wanted = match args.get(1) {
            Some(text) => parse::size(text).map_err(Complaint::Said)?,
            None => parse::SECTOR_BYTES,
        };
        let length = wanted.min(self.image()?.size().saturating_sub(offset));
        let mut allocated = 0;
        let failed = self
            .each_run(offset, length, |_, run, held| {
                if held == Held::Here {
                    allocated += run;
                }
            })
            .await;
        if let Err(words) = failed {
            return Err(Complaint::Said(format!("is_allocated failed: {words}")));
        }
        self.out
            .print(&report::allocated_line(allocated, length, offset));
        Ok(())
    }

    pub(super) async fn map(&self) -> Outcome {
        let size = self.image()?.size();
        let mut lines = Vec::new();
        let failed = self
            .each_run(0, size, |start, run, held| {
                lines.push(report::map_line(start, run, held));
            })
            .await;
        for line in lines {
            self.out.print(&line);
        }
        failed
            .map_err(|words| Complaint::ByName(format!("Failed to get allocation status: {words}")))
    }

    /// Calls `each` with the runs of a range that the image itself holds or does not, in their full
    /// lengths.
    async fn each_run(
        &self,
        offset: u64,
        length: u64,
        mut each: impl FnMut(u64, u64, Held),
    ) -> Result<(), String> {
        let Ok(image) = self.image() else {
            return Ok(());
        };
        let end = offset + length;
        let mut at = offset;
        let mut run = (offset, Held::Elsewhere);
        while at < end {
            let extents = image
                .extents(at, end - at, EXTENTS_MAX)
                .await
                .map_err(|error| report::cause(&error))?;
            if extents.is_empty() {
                break;
            }
            for extent in extents {
                let held = held(&extent);
                if held != run.1 {
                    if at > run.0 {
                        each(run.0, at - run.0, run.1);
                    }
                    run = (at, held);
                }
                at += extent.len;
            }
        }
        if at > run.0 {
            each(run.0, at - run.0, run.1);
        }
        Ok(())
    }

    pub(super) async fn truncate(&self, args: &[String]) -> Outcome {
        let mut scanner = Scanner::new(args, "m:", &[]);
        let mut preallocation = None;
        while let Some(option) = scanner.next_option()? {
            debug_assert_eq!(option.name, Name::Letter('m'));
            let mode = option.value();
            if !["off", "metadata", "falloc", "full"].contains(&mode.as_str()) {
                return Err(Complaint::ByName(format!(
                    "Invalid preallocation mode '{mode}'"
                )));
            }
            preallocation = (mode != "off").then_some(mode);
        }
        let operands = scanner.operands();
        let size = operands.first().copied().unwrap_or("");
        // Of a bad size qemu-io shows its first argument, options before operands.
        let option = args.iter().find(|arg| arg.starts_with('-'));
        let shown = option.map_or(size, |arg| arg);
        let size = parse::size_shown_as(size, shown).map_err(Complaint::Said)?;
        if let Some(mode) = preallocation {
            return Err(Complaint::ByName(format!(
                "Unsupported preallocation mode: {mode}"
            )));
        }
        let result = self.image()?.resize(size).await;
        result.map_err(|error| Complaint::ByName(error.to_string()))
    }
}

/// Whether the image itself says what a range holds.
fn held(extent: &Extent) -> Held {
    match extent.present && extent.depth == 0 {
        true => Held::Here,
        false => Held::Elsewhere,
    }
}

//! Where the guests of `bench guest` run: QEMU with a kernel, and an archive that is made on the
//! fly ([`initramfs`]), whose only program is this one ([`init`]).

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cowslip_console::error::CommandError;
use cowslip_console::output::Program;
use serde_json::{Value, json};

use self::boot::{MEMORY_MIB, PROCESSORS};
use self::kernel::Kernel;
use crate::run::{own_path, run};

mod boot;
pub mod init;
mod initramfs;
mod kernel;

pub use boot::{Guest, GuestDisk};

const QEMU: &str = "qemu-system-x86_64";
/// Time limit of a trial. With KVM it takes 2 s; a trial that takes much longer has no KVM that
/// runs this kernel.
const PROBE_WITHIN: Duration = Duration::from_secs(10);

/// Options of the machine of guests.
#[derive(Debug, Default, clap::Args)]
pub struct MachineOptions {
    /// The guest's kernel; the newest cloud kernel in /boot, if not given. Its modules are looked
    /// for beside it
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Accelerator of the guest: kvm, or tcg; kvm where it boots one, if not given
    #[arg(long, value_name = "NAME", value_parser = accelerator)]
    pub accel: Option<Accelerator>,
}

/// Accelerator of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU, by translation.
    Tcg,
}

fn accelerator(name: &str) -> Result<Accelerator, String> {
    match name {
        "kvm" => Ok(Accelerator::Kvm),
        "tcg" => Ok(Accelerator::Tcg),
        _ => Err(format!("--accel expects kvm or tcg, not '{name}'")),
    }
}

impl Accelerator {
    /// Returns the label of figures.
    fn label(self) -> &'static str {
        match self {
            Accelerator::Kvm => "KVM",
            Accelerator::Tcg => "TCG",
        }
    }
}

/// Properties that all guests of a run share.
#[derive(Debug)]
pub struct Machine {
    accelerator: Accelerator,
    kernel: Kernel,
    /// The guest's files. In memory, so that nothing of them is on the disk that is measured.
    archive: File,
    memory_mib: u32,
    /// QEMU's own words.
    qemu_version: String,
}

impl Machine {
    /// Finds what guests need, and whether KVM runs them.
    ///
    /// # Errors
    /// QEMU or a kernel is not there, or a kernel does not boot with what was asked for.
    pub fn new(options: &MachineOptions, program: &Program) -> Result<Machine, CommandError> {
        Machine::with_tools(options, program, (&own_path()?, &[]))
    }

    /// The same with this program as the guest's first, and with tools, which have the same paths
    /// there, and the modules of the file systems that they make.
    ///
    /// # Errors
    /// As of [`Machine::new`]; a tool cannot be read.
    pub fn with_tools(
        options: &MachineOptions,
        program: &Program,
        (init, tools): (&Path, &[PathBuf]),
    ) -> Result<Machine, CommandError> {
        if std::env::consts::ARCH != "x86_64" {
            return Err(CommandError::new("Guests are for x86-64 only"));
        }
        let kernel = Kernel::find(options.kernel.as_deref())?;
        let version = run(Command::new(QEMU).arg("--version")).map_err(|error| {
            CommandError::new(format!(
                "{error}: install QEMU's system emulator (Debian: qemu-system-x86)"
            ))
        })?;
        let archive = initramfs::build((init, tools), &kernel)?;
        // Once packed, once unpacked.
        let more = if tools.is_empty() {
            0
        } else {
            archive.len() / (1 << 19)
        };
        let mut machine = Machine {
            accelerator: options.accel.unwrap_or(Accelerator::Kvm),
            kernel,
            memory_mib: MEMORY_MIB + u32::try_from(more).unwrap_or(u32::MAX),
            archive: in_memory(&archive).map_err(|e| {
                let words = cowslip::error::system_words(&e);
                CommandError::new(format!(
                    "Could not keep the guest's files in memory: {words}"
                ))
            })?,
            qemu_version: version
                .output
                .lines()
                .next()
                .unwrap_or_default()
                .to_string(),
        };
        if options.accel.is_none() && !machine.runs_with_kvm(program) {
            machine.accelerator = Accelerator::Tcg;
        }
        Ok(machine)
    }

    /// Whether a guest comes up with KVM: a device alone proves nothing, as virtual machines may
    /// have one that runs only kernels that know it.
    fn runs_with_kvm(&self, program: &Program) -> bool {
        let device = File::options().read(true).write(true).open("/dev/kvm");
        if device.is_err() {
            return false;
        }
        let disk = json!({ "driver": "null-co", "node-name": "disk", "read-zeroes": true });
        let guest = Guest::boot(self, &GuestDisk::Block(disk), PROBE_WITHIN);
        match guest.and_then(Guest::turn_off) {
            Ok(()) => true,
            Err(_) => {
                program.warn("KVM is there, but boots no guest; they run without it");
                false
            }
        }
    }

    /// Runs of each contestant, if it is not said: without KVM they take long.
    pub fn repetitions(&self) -> usize {
        match self.accelerator {
            Accelerator::Kvm => 3,
            Accelerator::Tcg => 1,
        }
    }

    /// Returns the conditions for programs.
    pub fn conditions(&self) -> Value {
        json!({
            "accelerator": self.accelerator.label(),
            "kernel": self.kernel.release,
            "qemu": self.qemu_version,
            "processors": PROCESSORS,
            "memory-mib": self.memory_mib,
        })
    }

    /// Returns the note for people.
    pub fn note(&self) -> String {
        let mut note = format!(
            "{}: guests of {PROCESSORS} processor and {} MiB, Linux {}, {}. \
             IOPS are the guest's, with the flush at the end; so are overwrites, of the same places.",
            self.accelerator.label(),
            self.memory_mib,
            self.kernel.release,
            self.qemu_version,
        );
        if self.accelerator == Accelerator::Tcg {
            note += "\nWithout KVM most of the CPU time is the guest's, which is translated.";
        }
        note
    }
}

fn in_memory(bytes: &[u8]) -> std::io::Result<File> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create("initramfs", flags)?);
    file.write_all(bytes)?;
    Ok(file)
}

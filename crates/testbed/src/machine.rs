//! Describes the machine, as far as the kernel reports it without root: processor, memory,
//! virtualization, causes of a slow processor. From /proc and /sys, which tests replace by
//! directories.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Of a file of the kernel's, so much is read.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Warns of a load that was there before.
pub const BUSY: &str = "Other programs were running before the measurement: the load average was above half of the \
                        processors.";

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Machine {
    /// Model of its processors.
    pub processor: Option<String>,
    /// How many there are for programs.
    pub processors: usize,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Release of the kernel.
    pub kernel: String,
    /// The virtual machine or container it runs in; `None` if none was recognized.
    pub virtualization: Option<String>,
    /// The governors of the processors' frequencies, each once; empty if they are unknown.
    pub frequency_governors: Vec<String>,
    /// Runs on a battery; `None` where there is none.
    pub on_battery: Option<bool>,
    /// How many processes wanted to run during the last minute.
    pub load: Option<String>,
}

/// Where /proc and /sys are.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Root {
        Root(PathBuf::from("/"))
    }
}

impl Root {
    /// Another one than `/`.
    pub fn at(path: &Path) -> Root {
        Root(path.to_path_buf())
    }

    /// A path below it.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// The text of a file, without blanks around it; `None` if there is none.
    pub fn read(&self, path: &str) -> Option<String> {
        read(&self.path(path))
    }

    fn first_of(&self, directory: &str, file: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(directory)).into_iter().flatten();
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        paths
            .iter()
            .filter_map(|path| read(&path.join(file)))
            .collect()
    }
}

/// The text of a file of the kernel's; `None` if there is none.
pub fn read(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes).trim().to_string();
    (!text.is_empty()).then_some(text)
}

impl Machine {
    /// This one.
    pub fn look(root: &Root) -> Machine {
        let processors = root.read("proc/cpuinfo").unwrap_or_default();
        let mut governors: Vec<String> =
            root.first_of("sys/devices/system/cpu/cpufreq", "scaling_governor");
        governors.sort();
        governors.dedup();
        Machine {
            processor: processor(&processors),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory(&root.read("proc/meminfo").unwrap_or_default()),
            kernel: root.read("proc/sys/kernel/osrelease").unwrap_or_default(),
            virtualization: virtualization(root, &processors),
            frequency_governors: governors,
            on_battery: on_battery(root),
            load: root.read("proc/loadavg").and_then(|text| {
                let first = text.split_whitespace().next()?;
                Some(first.to_string())
            }),
        }
    }

    /// Returns the circumstances that a reader of its figures must know.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(what) = &self.virtualization {
            warnings.push(format!(
                "This is no bare machine ({what}): its processors and its disk are shared with others, so figures \
                 are noisy."
            ));
        }
        if self.on_battery == Some(true) {
            warnings.push("The machine runs on its battery, which may slow it down.".to_string());
        }
        let slowing = |governor: &&String| governor.as_str() != "performance";
        if let Some(governor) = self.frequency_governors.iter().find(slowing) {
            warnings.push(format!(
                "The processors' frequency changes with the load (governor {governor})."
            ));
        }
        let load: Option<f64> = self.load.as_ref().and_then(|load| load.parse().ok());
        if load.is_some_and(|load| load > self.processors as f64 / 2.0) {
            warnings.push(BUSY.to_string());
        }
        warnings
    }
}

fn field<'a>(text: &'a str, names: &[&str]) -> Option<&'a str> {
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let mut named = fields.filter(|(name, _)| names.contains(&name.trim()));
    named.next().map(|(_, value)| value.trim())
}

fn processor(cpuinfo: &str) -> Option<String> {
    let model = field(
        cpuinfo,
        &["model name", "Model", "Processor", "cpu model", "cpu"],
    )?;
    let words: Vec<&str> = model.split_whitespace().collect();
    Some(words.join(" "))
}

fn memory(meminfo: &str) -> Option<u64> {
    let kibibytes = field(meminfo, &["MemTotal"])?.split_whitespace().next()?;
    kibibytes.parse::<u64>().ok()?.checked_mul(1024)
}

/// Products that are machines of software.
const VIRTUAL: [&str; 12] = [
    "QEMU",
    "KVM",
    "VMware",
    "VirtualBox",
    "Bochs",
    "Xen",
    "Virtual Machine",
    "Google Compute",
    "Amazon EC2",
    "OpenStack",
    "Parallels",
    "HVM domU",
];

fn virtualization(root: &Root, cpuinfo: &str) -> Option<String> {
    let mut found = Vec::new();
    let flags = field(cpuinfo, &["flags", "Features"]).unwrap_or_default();
    let product = ["sys_vendor", "product_name"].map(|file| {
        root.read(&format!("sys/class/dmi/id/{file}"))
            .unwrap_or_default()
    });
    let product = product.join(" ");
    let is_virtual = flags.split(' ').any(|flag| flag == "hypervisor")
        || VIRTUAL.iter().any(|name| product.contains(name));
    if let Some(kind) = root.read("sys/hypervisor/type") {
        found.push(format!("hypervisor {kind}"));
    } else if is_virtual {
        found.push(match product.trim() {
            "" => "a virtual machine".to_string(),
            product => format!("a virtual machine, {product}"),
        });
    }
    let is_container = [".dockerenv", "run/.containerenv", "run/systemd/container"];
    if is_container.iter().any(|path| root.path(path).exists()) {
        found.push("a container".to_string());
    }
    (!found.is_empty()).then(|| found.join(", in "))
}

fn on_battery(root: &Root) -> Option<bool> {
    let supplies = "sys/class/power_supply";
    let statuses = root.first_of(supplies, "status");
    (!statuses.is_empty()).then(|| statuses.iter().any(|status| status == "Discharging"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> Machine {
        let directory = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Machine::look(&Root::at(directory.path()))
    }

    #[test]
    fn a_laptop_is_recognised_by_its_files() {
        let governor = |cpu| format!("sys/devices/system/cpu/cpufreq/policy{cpu}/scaling_governor");
        let found = machine(&[
            (
                "proc/cpuinfo",
                "processor\t: 0\nmodel name\t: A  Fast CPU\nflags\t\t: fpu vme\n",
            ),
            (
                "proc/meminfo",
                "MemTotal:       16303612 kB\nMemFree: 1 kB\n",
            ),
            ("proc/sys/kernel/osrelease", "6.18.1\n"),
            ("sys/class/power_supply/BAT0/status", "Discharging\n"),
            (&governor(0), "powersave\n"),
            (&governor(1), "powersave\n"),
        ]);
        assert_eq!(found.processor.as_deref(), Some("A Fast CPU"));
        assert_eq!(found.memory_bytes, Some(16_303_612 << 10));
        assert_eq!(found.kernel, "6.18.1");
        assert_eq!(found.frequency_governors, ["powersave"]);
        assert_eq!(
            (found.on_battery, &found.virtualization),
            (Some(true), &None)
        );
        let warnings = found.warnings().join("\n");
        assert!(warnings.contains("battery") && warnings.contains("powersave"));
    }

    #[test]
    fn virtual_machines_and_containers_are_recognised() {
        let flags = ("proc/cpuinfo", "flags : fpu hypervisor\n");
        let bare = machine(&[flags]);
        assert_eq!(bare.virtualization.as_deref(), Some("a virtual machine"));
        let named = machine(&[
            ("sys/class/dmi/id/sys_vendor", "QEMU\n"),
            ("sys/class/dmi/id/product_name", "Standard PC\n"),
            (".dockerenv", ""),
        ]);
        assert_eq!(
            named.virtualization.as_deref(),
            Some("a virtual machine, QEMU Standard PC, in a container")
        );
        assert!(named.warnings()[0].contains("noisy"));
    }

    #[test]
    fn a_machine_without_information_is_no_failure() {
        let found = machine(&[]);
        assert_eq!((found.processor, found.memory_bytes), (None, None));
        assert_eq!(found.on_battery, None);
    }
}

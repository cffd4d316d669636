//! Targets that are made where bytes were before: whatever a device, an export or a data file held,
//! the copy shows the source.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::loop_device::LoopDevice;
use crate::support::server::Server;
use crate::support::{cowslip, outcome, run, scratch_beside};

const DISK_BYTES: u64 = 1 << 20;
/// A device's length: the disk, and room for an image's tables.
const DEVICE_BYTES: usize = 4 << 20;
const GARBAGE: u8 = 0xee;

/// Where an image, or its data, is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    NewFile,
    /// A file with other bytes in it.
    OldFile,
    Device,
    Export,
}

impl Place {
    const ALL: [Place; 4] = [Place::NewFile, Place::OldFile, Place::Device, Place::Export];
}

/// A place full of garbage.
struct Made {
    name: String,
    file: PathBuf,
    _device: Option<LoopDevice>,
    _server: Option<Server>,
}

impl Made {
    /// `None` where there is none here.
    fn new(dir: &Path, place: Place, stem: &str) -> Option<Made> {
        let file = dir.join(format!("{stem}.img"));
        if place != Place::NewFile {
            fs::write(&file, vec![GARBAGE; DEVICE_BYTES]).unwrap();
        }
        let mut made = Made {
            name: file.display().to_string(),
            file,
            _device: None,
            _server: None,
        };
        match place {
            Place::NewFile | Place::OldFile => {}
            Place::Device => {
                let device = LoopDevice::over(&made.file, &[])?;
                made.name = device.path.display().to_string();
                made._device = Some(device);
            }
            Place::Export => {
                let socket = dir.join(format!("{stem}.sock"));
                let server = Server::of_qemu(&made.file, &socket, &["--discard=unmap"]);
                made.name = server.uri();
                made._server = Some(server);
            }
        }
        Some(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.file));
    }
}

/// A disk of zeroes with some data: known zeroes at its beginning and end, holes, and zeroes that
/// are stored as data.
fn source(dir: &Path) {
    let file = fs::File::create(dir.join("s.raw")).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    use std::os::unix::fs::FileExt;
    file.write_all_at(&[1; 5000], 300 << 10).unwrap();
    file.write_all_at(&[0; 64 << 10], 512 << 10).unwrap();
    file.write_all_at(b"x", 700_001).unwrap();
    run(Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2", "s.raw", "s.qcow2"])
        .current_dir(dir));
}

fn ours(words: &[&str]) -> Command {
    let mut command = cowslip();
    command.arg0("qemu-img").args(words);
    command
}

/// Converts, if that is possible with these options there, and compares.
fn check(dir: &Path, words: &[&str], target: (&str, &str)) {
    let (format, name) = target;
    let converted = outcome(ours(words).current_dir(dir));
    let errors = String::from_utf8_lossy(&converted.stderr).into_owned();
    let context = format!("{words:?}\n{errors}");
    if !converted.status.success() {
        // Some modes of preallocation are refused by name in some places, here as by qemu-img.
        let is_refusal = errors.contains("nsupported preallocation mode");
        assert!(is_refusal, "{context}");
        return;
    }
    let mut compare = Command::new("qemu-img");
    compare.args(["compare", "-f", "raw", "-F", format]);
    if format == "raw" {
        // A raw device is longer than the disk.
        let mut shown = vec![0; DISK_BYTES as usize];
        let read = outcome(Command::new("qemu-img").current_dir(dir).args([
            "dd",
            "-f",
            "raw",
            "-O",
            "raw",
            "bs=1M",
            "count=1",
            &format!("if={name}"),
            "of=shown.raw",
        ]));
        assert!(read.status.success(), "{context}{read:?}");
        shown.copy_from_slice(&fs::read(dir.join("shown.raw")).unwrap()[..DISK_BYTES as usize]);
        fs::remove_file(dir.join("shown.raw")).unwrap();
        assert!(shown == fs::read(dir.join("s.raw")).unwrap(), "{context}");
        return;
    }
    let compared = outcome(compare.args(["s.raw", name]).current_dir(dir));
    assert!(compared.status.success(), "{context}{compared:?}");
}

/// Command lines that make a raw target, TO, of the disk. MODE is every preallocation.
const TO_RAW: &[&str] = &[
    "convert -O raw -o preallocation=MODE s.raw TO",
    "convert -O raw -o preallocation=MODE s.qcow2 TO",
    "convert -O raw -S 0 s.qcow2 TO",
    "convert -O raw -C s.qcow2 TO",
    "dd -O raw bs=4k if=s.raw of=TO",
    "dd -O raw bs=4k if=s.qcow2 of=TO",
];

/// The same of images.
const TO_QCOW2: &[&str] = &[
    "convert -O qcow2 -o preallocation=MODE s.raw TO",
    "convert -O qcow2 -o preallocation=MODE,extended_l2=on s.raw TO",
    "convert -O qcow2 -o preallocation=MODE,compat=0.10 s.raw TO",
    "convert -O qcow2 -c s.qcow2 TO",
    "convert -O qcow2 -S 0 s.qcow2 TO",
    "dd -O qcow2 bs=4k if=s.raw of=TO",
];
const MODES: [&str; 4] = ["off", "metadata", "falloc", "full"];

/// Every line makes a target in every place.
fn check_all(format: &str, lines: &[&str]) {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-nbd"]) else {
        return;
    };
    source(dir);
    for place in Place::ALL {
        for line in lines {
            let modes = match line.contains("MODE") {
                true => &MODES[..],
                false => &MODES[..1],
            };
            for mode in modes {
                let Some(made) = Made::new(dir, place, "t") else {
                    continue;
                };
                let line = line.replace("MODE", mode).replace("TO", &made.name);
                let words: Vec<&str> = line.split_whitespace().collect();
                check(dir, &words, (format, &made.name));
            }
        }
    }
}

#[test]
fn raw_targets_show_the_source_whatever_was_there() {
    check_all("raw", TO_RAW);
}

#[test]
fn qcow2_targets_show_the_source_whatever_was_there() {
    check_all("qcow2", TO_QCOW2);
}

#[test]
fn targets_with_data_files_show_the_source_whatever_was_there() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-nbd"]) else {
        return;
    };
    source(dir);
    // Data files lie in files and on devices.
    for data in [Place::NewFile, Place::OldFile, Place::Device] {
        for image in [Place::NewFile, Place::Device] {
            for mode in MODES {
                for raw in ["on", "off"] {
                    let made = (Made::new(dir, image, "t"), Made::new(dir, data, "d"));
                    let (Some(made), Some(data)) = made else {
                        continue;
                    };
                    let name = &data.name;
                    let options =
                        format!("data_file={name},data_file_raw={raw},preallocation={mode}");
                    let words = [
                        "convert", "-O", "qcow2", "-o", &options, "s.raw", &made.name,
                    ];
                    check(dir, &words, ("qcow2", &made.name));
                    if raw == "on" {
                        let shown = fs::read(&data.name);
                        let shown = shown.unwrap_or_else(|_| fs::read(&data.file).unwrap());
                        assert!(
                            shown[..DISK_BYTES as usize] == fs::read(dir.join("s.raw")).unwrap(),
                            "{words:?}: the data file"
                        );
                    }
                }
            }
        }
    }
}

/// Encrypted space that was never written may decrypt to anything.
#[test]
fn encrypted_targets_show_the_source_whatever_was_there() {
    let Some(dir) = &scratch_beside(&["qemu-img"]) else {
        return;
    };
    source(dir);
    let secret = ["--object", "secret,id=k,data=secret"];
    for place in [Place::NewFile, Place::OldFile, Place::Device] {
        for mode in ["off", "metadata"] {
            for (format, keys) in [
                (
                    "qcow2",
                    "encrypt.format=luks,encrypt.key-secret=k,encrypt.iter-time=10",
                ),
                ("qcow2", "encryption=on,encrypt.key-secret=k"),
                ("luks", "key-secret=k,iter-time=10"),
            ] {
                if format == "luks" && mode == "metadata" {
                    continue;
                }
                let Some(made) = Made::new(dir, place, "t") else {
                    continue;
                };
                let options = format!("{keys},preallocation={mode}");
                let mut convert = ours(&["convert"]);
                convert
                    .args(secret)
                    .args(["-O", format, "-o", &options, "s.raw", &made.name]);
                let converted = outcome(convert.current_dir(dir));
                assert!(
                    converted.status.success(),
                    "{options} {place:?}: {converted:?}"
                );
                let name = &made.name;
                let target = match format {
                    // On a device the volume is longer than the disk.
                    "luks" => format!(
                        "driver=raw,size=1M,file.driver=luks,file.key-secret=k,file.file.filename={name}"
                    ),
                    _ => format!("driver=qcow2,encrypt.key-secret=k,file.filename={name}"),
                };
                let mut compare = Command::new("qemu-img");
                compare.arg("compare").args(secret).arg("--image-opts");
                compare.args(["driver=raw,file.filename=s.raw", &target]);
                let compared = outcome(compare.current_dir(dir));
                assert!(
                    compared.status.success(),
                    "{options} {place:?}: {compared:?}"
                );
            }
        }
    }
}

//! The files that command lines are about: made once by QEMU, copied for each program.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use crate::support::golden::words;
use crate::support::rng::Rng;
use crate::support::run;

/// Images and raw files that lines name most; each is there in every directory.
pub const IMAGES: &[&str] = &[
    "img.qcow2",
    "img.qcow2",
    "img.qcow2",
    "base.qcow2",
    "mid.qcow2",
    "top.qcow2",
    "over.qcow2",
    "packed.qcow2",
    "data.qcow2",
    "v2.qcow2",
    "a.raw",
    "odd.raw",
];

/// Files that are no good images, and names that are no files.
pub const ODDITIES: &[&str] = &[
    "leaky.qcow2",
    "bad.qcow2",
    "orphan.qcow2",
    "short.qcow2",
    "junk",
    "empty",
    "dir",
    "nosuch",
    "nosuch/x",
    "co:lon",
    "./co:lon",
    "file:co:lon",
    "file:img.qcow2",
    "com,ma.qcow2",
    "-dash",
    "",
];

/// Bytes of most disks.
const DISK_BYTES: u64 = 1 << 20;

/// One directory, and how the image that varies was made.
pub struct Cast {
    pub directory: PathBuf,
    /// For reports.
    pub log: String,
}

impl Cast {
    /// Makes the files, which vary with the seed.
    pub fn make(directory: PathBuf, seed: u64) -> Cast {
        std::fs::create_dir(&directory).unwrap();
        let mut cast = Cast {
            directory,
            log: String::new(),
        };
        let mut rng = Rng::named(seed, "cast");
        cast.plain_files(&mut rng);
        cast.chain(&mut rng);
        cast.various(&mut rng);
        cast.damaged();
        cast
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn qemu_img(&mut self, line: &str) {
        self.log += &format!("  qemu-img {line}\n");
        run(Command::new("qemu-img")
            .current_dir(&self.directory)
            .args(words(line)));
    }

    fn qemu_io(&mut self, file: &str, lines: &[String]) {
        self.log += &format!("  qemu-io {file}: {}\n", lines.join("; "));
        let lines = lines.iter().flat_map(|line| ["-c", line]);
        run(Command::new("qemu-io")
            .current_dir(&self.directory)
            .args(["-f", "qcow2"])
            .args(lines)
            .arg(file));
    }

    fn plain_files(&self, rng: &mut Rng) {
        let a = File::create(self.path("a.raw")).unwrap();
        a.set_len(DISK_BYTES).unwrap();
        for _ in 0..6 {
            let len = 512 * (1 + rng.below(200));
            let offset = rng.below((DISK_BYTES - len) / 512) * 512;
            a.write_all_at(&rng.bytes(len as usize), offset).unwrap();
        }
        for (name, content) in [
            ("odd.raw", vec![7; 70_001]),
            ("empty", Vec::new()),
            ("junk", rng.bytes(4096)),
            ("co:lon", vec![3; 2048]),
            ("-dash", vec![4; 1024]),
        ] {
            std::fs::write(self.path(name), content).unwrap();
        }
        std::fs::create_dir(self.path("dir")).unwrap();
    }

    fn chain(&mut self, rng: &mut Rng) {
        self.qemu_img("create -q -f qcow2 -o cluster_size=4k base.qcow2 1M");
        let lines = writes(rng, DISK_BYTES, 6);
        self.qemu_io("base.qcow2", &lines);
        let sizes = [512 << 10, DISK_BYTES, DISK_BYTES + (320 << 10)];
        for (name, below, format) in [
            ("mid.qcow2", "base.qcow2", "qcow2"),
            ("top.qcow2", "mid.qcow2", "qcow2"),
            ("over.qcow2", "a.raw", "raw"),
        ] {
            let size = *rng.pick(&sizes);
            let options = *rng.pick(&["compat=1.1", "extended_l2=on", "cluster_size=16k"]);
            self.qemu_img(&format!(
                "create -q -f qcow2 -o {options} -b {below} -F {format} {name} {size}"
            ));
            let lines = writes(rng, size, 4);
            self.qemu_io(name, &lines);
        }
    }

    fn various(&mut self, rng: &mut Rng) {
        let options = *rng.pick(&[
            "compat=1.1",
            "compat=0.10",
            "cluster_size=512",
            "cluster_size=4k",
            "cluster_size=2M",
            "extended_l2=on",
            "extended_l2=on,cluster_size=16k",
            "refcount_bits=1",
            "refcount_bits=64,cluster_size=4k",
            "lazy_refcounts=on",
            "compression_type=zstd",
        ]);
        let size = *rng.pick(&["1M", "1000k", "100000", "3M"]);
        self.qemu_img(&format!("create -q -f qcow2 -o {options} img.qcow2 {size}"));
        let bytes = match size {
            "3M" => 3 << 20,
            "100000" => 99_840,
            _ => 1000 << 10,
        };
        let first = writes(rng, bytes, 5);
        self.qemu_io("img.qcow2", &first);
        let counts = !options.contains("refcount_bits=1");
        if counts && rng.once_in(2) {
            self.qemu_img("snapshot -c s1 img.qcow2");
            let second = writes(rng, bytes, 3);
            self.qemu_io("img.qcow2", &second);
            if rng.once_in(2) {
                self.qemu_img("snapshot -c 1 img.qcow2");
            }
        }
        if !options.contains("0.10") && rng.once_in(2) {
            self.qemu_img("bitmap --add img.qcow2 b0");
            let third = writes(rng, bytes, 2);
            self.qemu_io("img.qcow2", &third);
            self.qemu_img("bitmap --add -g 32k --disable img.qcow2 b1");
        }
        let codec = *rng.pick(&["zlib", "zstd"]);
        self.qemu_img(&format!(
            "convert -c -O qcow2 -o compression_type={codec} a.raw packed.qcow2"
        ));
        let raw = *rng.pick(&["on", "off"]);
        self.qemu_img(&format!(
            "create -q -f qcow2 -o data_file=data.bin,data_file_raw={raw} data.qcow2 1M"
        ));
        let writes_of = writes(rng, DISK_BYTES, 3);
        self.qemu_io("data.qcow2", &writes_of);
        self.qemu_img("convert -O qcow2 -o compat=0.10 base.qcow2 v2.qcow2");
        self.qemu_img("create -q -f qcow2 com,ma.qcow2 1M");
    }

    /// A leak, an entry with a wrong mark, a backing file that is gone, a header that ends early.
    fn damaged(&mut self) {
        for name in ["leaky.qcow2", "bad.qcow2"] {
            self.qemu_img(&format!("create -q -f qcow2 {name} 1M"));
            self.qemu_io(name, &["write -P 9 0 128k".to_string()]);
        }
        let edit = |name: &str, bytes: &[u8], offset: u64| {
            let file = File::options().write(true).open(self.path(name));
            file.unwrap().write_all_at(bytes, offset).unwrap();
        };
        // The count of cluster 7, in the first refcount block: the file has seven, 0 to 6.
        edit("leaky.qcow2", &[0, 1], 0x2_0000 + 14);
        edit("leaky.qcow2", &[0; 512], 8 * 0x1_0000 - 512);
        // The first L2 entry, without the mark that its cluster has one reference.
        edit("bad.qcow2", &[0, 0, 0, 0, 0, 5, 0, 0], 0x4_0000);
        self.qemu_img("create -q -f qcow2 gone.qcow2 1M");
        self.qemu_img("create -q -f qcow2 -b gone.qcow2 -F qcow2 orphan.qcow2");
        std::fs::remove_file(self.path("gone.qcow2")).unwrap();
        let start = std::fs::read(self.path("base.qcow2")).unwrap();
        std::fs::write(self.path("short.qcow2"), &start[..60]).unwrap();
    }
}

/// Lines of qemu-io that give a disk data, zeroes and holes.
fn writes(rng: &mut Rng, disk_bytes: u64, count: u64) -> Vec<String> {
    (0..count)
        .map(|_| {
            let len = 512 * (1 + rng.below(300.min(disk_bytes / 512 - 1)));
            let offset = rng.below((disk_bytes - len) / 512 + 1) * 512;
            match rng.below(8) {
                0 => format!("write -z {offset} {len}"),
                1 => format!("discard {offset} {len}"),
                _ => format!("write -P {} {offset} {len}", 1 + rng.below(255)),
            }
        })
        .collect()
}

//! Command lines from a seed. They know what qemu-img accepts, so most are nearly right: options in
//! any order, cluster and spelling, some repeated, some contradicting each other; then sometimes a
//! word is lost, doubled, or another.
//!
//! The output of a valid line is bounded: sizes are small, or so large that they are refused.

use super::cast::{IMAGES, ODDITIES};
use crate::support::rng::Rng;

/// The value that an option takes.
#[derive(Clone, Copy)]
pub enum Takes {
    Nothing,
    /// One of these.
    Of(&'static [&'static str]),
    /// A value that this function makes.
    Made(fn(&mut Lines) -> String),
    Format,
    Image,
    Cache,
    Output,
    Size,
    Number,
    CreateOptions,
    AmendOptions,
    MeasureOptions,
    Snapshot,
    LoadedSnapshot,
    Bitmap,
    Granularity,
    Repair,
    Preallocation,
    Sparse,
    Coroutines,
    Rate,
    Pattern,
    Count,
    Aio,
    Object,
}

use Takes::{
    Aio, AmendOptions, Bitmap, Cache, Coroutines, Count, CreateOptions, Format, Granularity, Image,
    LoadedSnapshot, MeasureOptions, Nothing, Number, Object, Output, Pattern, Preallocation, Rate,
    Repair, Size, Snapshot, Sparse,
};

/// An option: its spellings, its value, and `n` if it appears in one line out of `n`.
pub type Choice = (&'static [&'static str], Takes, u64);

const QUIET: Choice = (&["-q", "--quiet"], Nothing, 8);
const PROGRESS: Choice = (&["-p", "--progress"], Nothing, 8);
const FORMAT: Choice = (&["-f", "--format"], Format, 4);
const IMAGE_OPTS: Choice = (&["--image-opts"], Nothing, 40);
const FORCE_SHARE: Choice = (&["-U", "--force-share"], Nothing, 8);
const OUTPUT: Choice = (&["--output"], Output, 3);
pub const OBJECT: Choice = (&["--object"], Object, 60);

/// A verb: its options, and what follows them.
struct Verb {
    name: &'static str,
    weight: u64,
    /// Those that several verbs have.
    common: &'static [Choice],
    options: &'static [Choice],
    operands: fn(&mut Lines) -> Vec<String>,
}

const VERBS: &[Verb] = &[
    Verb {
        name: "create",
        weight: 10,
        common: &[QUIET, OBJECT],
        options: &[
            (&["-f", "--format"], Format, 1),
            (&["-b", "--backing"], Image, 4),
            (&["-F", "--backing-format"], Format, 4),
            (&["-u", "--backing-unsafe"], Nothing, 8),
            (&["-o", "--options"], CreateOptions, 2),
        ],
        operands: |lines| {
            let mut operands = vec![lines.new_file()];
            if !lines.rng.once_in(6) {
                operands.push(lines.size());
            }
            operands
        },
    },
    Verb {
        name: "info",
        weight: 8,
        common: &[FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT, OUTPUT],
        options: &[(&["-b", "--backing-chain"], Nothing, 4)],
        operands: one_image,
    },
    Verb {
        name: "check",
        weight: 8,
        common: &[QUIET, FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT, OUTPUT],
        options: &[
            (&["-r", "--repair"], Repair, 3),
            (&["-T", "--cache"], Cache, 10),
        ],
        operands: one_image,
    },
    Verb {
        name: "map",
        weight: 8,
        common: &[FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT, OUTPUT],
        options: &[
            (&["-s", "--start-offset"], Size, 5),
            (&["-l", "--max-length"], Size, 5),
        ],
        operands: one_image,
    },
    Verb {
        name: "convert",
        weight: 12,
        common: &[QUIET, OBJECT, IMAGE_OPTS, FORCE_SHARE],
        options: &[
            // It has no long name there.
            (&["-p"], Nothing, 8),
            (&["-f", "--source-format"], Format, 4),
            (&["--source-image-opts"], Nothing, 50),
            (&["-T", "--source-cache"], Cache, 10),
            (&["-l", "--snapshot"], LoadedSnapshot, 8),
            (&["-S", "--sparse-size"], Sparse, 8),
            (&["-O", "--output-format"], Format, 2),
            (&["-o", "--options"], CreateOptions, 4),
            (&["-t", "--output-cache"], Cache, 10),
            (&["-B", "--backing"], Image, 10),
            (&["-F", "--backing-format"], Format, 10),
            (&["--target-image-opts"], Nothing, 50),
            (&["--salvage"], Nothing, 20),
            (&["--target-is-zero"], Nothing, 20),
            (&["--bitmaps"], Nothing, 10),
            (&["--skip-broken-bitmaps"], Nothing, 20),
            (&["-r", "--rate"], Rate, 20),
            (&["-m", "--parallel"], Coroutines, 10),
            (&["-W", "--oob-writes"], Nothing, 10),
            (&["-C", "--copy-range-offloading"], Nothing, 20),
            (&["-c"], Nothing, 6),
            (&["-n"], Nothing, 10),
        ],
        operands: |lines| {
            let mut operands = vec![lines.image()];
            if lines.rng.once_in(12) {
                operands.push(lines.image());
            }
            operands.push(lines.target());
            operands
        },
    },
    Verb {
        name: "compare",
        weight: 6,
        common: &[QUIET, PROGRESS, IMAGE_OPTS, FORCE_SHARE, OBJECT],
        options: &[
            (&["-f", "--a-format", "--left-format"], Format, 5),
            (&["-F", "--b-format", "--right-format"], Format, 5),
            (&["-T", "--cache"], Cache, 10),
            (&["-s", "--strict"], Nothing, 3),
        ],
        operands: |lines| vec![lines.image(), lines.image()],
    },
    Verb {
        name: "commit",
        weight: 5,
        common: &[QUIET, PROGRESS, FORMAT, IMAGE_OPTS, OBJECT],
        options: &[
            (&["-t", "--cache"], Cache, 8),
            (&["-d", "--drop"], Nothing, 4),
            (&["-b", "--base"], Image, 4),
            (&["-r", "--rate"], Rate, 20),
        ],
        operands: |lines| vec![lines.overlay()],
    },
    Verb {
        name: "rebase",
        weight: 7,
        common: &[QUIET, PROGRESS, FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT],
        options: &[
            (&["-t", "--cache"], Cache, 10),
            (&["-T", "--backing-cache"], Cache, 10),
            (&["-b", "--backing"], Image, 1),
            (&["-F", "--backing-format"], Format, 2),
            (&["-u", "--backing-unsafe"], Nothing, 3),
            (&["-c", "--compress"], Nothing, 8),
        ],
        operands: |lines| vec![lines.overlay()],
    },
    Verb {
        name: "resize",
        weight: 7,
        common: &[QUIET, FORMAT, IMAGE_OPTS, OBJECT],
        options: &[
            (&["--preallocation"], Preallocation, 4),
            (&["--shrink"], Nothing, 2),
        ],
        operands: |lines| vec![lines.image(), lines.change_of_size()],
    },
    Verb {
        name: "snapshot",
        weight: 8,
        common: &[QUIET, FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT],
        options: &[
            (&["-l", "--list"], Nothing, 4),
            // By their long names they take no value there, which they need.
            (&["-c"], Snapshot, 3),
            (&["-a"], Snapshot, 5),
            (&["-d"], Snapshot, 5),
        ],
        operands: one_image,
    },
    Verb {
        name: "bitmap",
        weight: 8,
        common: &[IMAGE_OPTS, OBJECT],
        options: &[
            (&["-f"], Format, 5),
            (&["--add"], Nothing, 2),
            (&["--remove"], Nothing, 4),
            (&["--clear"], Nothing, 4),
            (&["--enable"], Nothing, 4),
            (&["--disable"], Nothing, 4),
            (&["--merge"], Bitmap, 6),
            (&["-g", "--granularity"], Granularity, 4),
            (&["-b", "--source-file"], Image, 10),
            (&["-F", "--source-format"], Format, 12),
        ],
        operands: |lines| vec![lines.image(), lines.bitmap()],
    },
    Verb {
        name: "amend",
        weight: 6,
        common: &[QUIET, PROGRESS, FORMAT, IMAGE_OPTS, OBJECT],
        options: &[
            (&["-t", "--cache"], Cache, 10),
            (&["-o", "--options"], AmendOptions, 1),
            (&["--force"], Nothing, 10),
        ],
        operands: one_image,
    },
    Verb {
        name: "measure",
        weight: 6,
        common: &[FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT, OUTPUT],
        options: &[
            (&["-O", "--target-format"], Format, 2),
            (&["-o", "--options"], MeasureOptions, 4),
            (&["-l", "--snapshot"], LoadedSnapshot, 8),
            (&["--size"], Size, 4),
        ],
        operands: |lines| match lines.rng.below(4) {
            0 => Vec::new(),
            _ => vec![lines.image()],
        },
    },
    Verb {
        name: "dd",
        weight: 5,
        common: &[FORMAT, IMAGE_OPTS, FORCE_SHARE, OBJECT],
        options: &[(&["-O", "--output-format"], Format, 3)],
        operands: |lines| {
            let mut operands = vec![
                format!("if={}", lines.image()),
                format!("of={}", lines.target()),
            ];
            for name in ["bs", "count", "skip"] {
                if lines.rng.once_in(3) {
                    let value = lines.dd_number(name);
                    operands.push(format!("{name}={value}"));
                }
            }
            if lines.rng.once_in(20) {
                operands.push(
                    (*lines
                        .rng
                        .pick(&["seek=1", "foo", "conv=notrunc", "=", "if="]))
                    .into(),
                );
            }
            lines.shuffle(&mut operands);
            operands
        },
    },
    Verb {
        name: "bench",
        weight: 2,
        common: &[FORMAT, IMAGE_OPTS, FORCE_SHARE],
        options: &[
            (&["-q"], Nothing, 8),
            (&["-c", "--count"], Count, 1),
            (&["-d", "--depth"], Count, 3),
            (&["-o", "--offset"], Size, 4),
            (&["-s", "--buffer-size"], Number, 4),
            (&["-S", "--step-size"], Number, 4),
            (&["-t", "--cache"], Cache, 6),
            (&["-i", "--aio"], Aio, 8),
            (&["-n", "--native"], Nothing, 10),
            (&["-w", "--write"], Nothing, 2),
            (&["--pattern"], Pattern, 4),
            (&["--flush-interval"], Count, 6),
            (&["--no-drain"], Nothing, 6),
        ],
        operands: one_image,
    },
];

fn one_image(lines: &mut Lines) -> Vec<String> {
    vec![lines.image()]
}

/// The generator of one case.
pub struct Lines {
    pub rng: Rng,
}

impl Lines {
    /// From a seed.
    pub fn new(seed: u64) -> Lines {
        Lines {
            rng: Rng::named(seed, "lines"),
        }
    }

    /// A command line, the program's name not among its words.
    pub fn line(&mut self) -> Vec<String> {
        if self.rng.once_in(60) {
            return self.without_verb();
        }
        let total: u64 = VERBS.iter().map(|verb| verb.weight).sum();
        let mut at = self.rng.below(total);
        let verb = VERBS.iter().find(|verb| {
            let is_it = at < verb.weight;
            at = at.saturating_sub(verb.weight);
            is_it
        });
        let verb = verb.expect("below the total");
        let parts = self.options(&[verb.common, verb.options].concat());
        let operands = (verb.operands)(self);
        let mut words = self.joined(parts, operands);
        words.insert(0, verb.name.to_string());
        words
    }

    /// Some of these options, in any order.
    pub fn options(&mut self, choices: &[Choice]) -> Vec<Vec<String>> {
        let mut parts: Vec<Vec<String>> = Vec::new();
        for (spellings, takes, times) in choices {
            while self.rng.once_in(*times) {
                parts.push(self.option(spellings, *takes));
                if *times == 1 || !self.rng.once_in(6) {
                    break;
                }
            }
        }
        self.shuffle(&mut parts);
        parts
    }

    /// Options and operands as words, sometimes with a mistake.
    pub fn joined(&mut self, mut parts: Vec<Vec<String>>, operands: Vec<String>) -> Vec<String> {
        // Operands keep their order, between options.
        let mut from = 0;
        for operand in operands {
            let at = from + self.rng.below((parts.len() - from) as u64 + 1) as usize;
            let at = if self.rng.once_in(3) { at } else { parts.len() };
            parts.insert(at, vec![operand]);
            from = at + 1;
        }
        if self.rng.once_in(30) {
            let at = self.rng.below(parts.len() as u64 + 1) as usize;
            parts.insert(at, vec!["--".to_string()]);
        }
        let mut words: Vec<String> = parts.concat();
        if self.rng.once_in(6) {
            self.mangle(&mut words);
        }
        words
    }

    fn without_verb(&mut self) -> Vec<String> {
        let lines: &[&[&str]] = &[
            &[],
            &["foo"],
            &["--foo"],
            &["-x", "info", "a.raw"],
            &["--", "info", "a.raw"],
            &["-T"],
            &["--vers=1"],
            &["--=x"],
            &["info", "--=x"],
            &["convert", "--s", "a.raw"],
            &["bitmap", "--source", "a.raw"],
            &["inf", "a.raw"],
            &["", "a.raw"],
            &["help"],
        ];
        let line = *self.rng.pick(lines);
        line.iter().map(|word| word.to_string()).collect()
    }

    /// An option in one of its spellings, and its value.
    fn option(&mut self, spellings: &[&str], takes: Takes) -> Vec<String> {
        let mut name = (*self.rng.pick(spellings)).to_string();
        let is_long = name.starts_with("--");
        if is_long && self.rng.once_in(12) {
            let shortest = 3;
            let length = shortest + self.rng.below((name.len() - shortest) as u64 + 1) as usize;
            name.truncate(length);
        }
        let Some(value) = self.value(takes) else {
            return vec![name];
        };
        match (is_long, self.rng.below(3)) {
            (true, 0 | 1) => vec![format!("{name}={value}")],
            (false, 0) if !value.is_empty() => vec![format!("{name}{value}")],
            _ => vec![name, value],
        }
    }

    fn value(&mut self, takes: Takes) -> Option<String> {
        let choices: &[&str] = match takes {
            Nothing => return None,
            Takes::Of(values) => values,
            Takes::Made(make) => return Some(make(self)),
            Format => &[
                "qcow2", "qcow2", "qcow2", "qcow2", "raw", "raw", "raw", "foo", "",
            ],
            Image => return Some(self.image()),
            Cache => &[
                "none",
                "writeback",
                "unsafe",
                "writethrough",
                "directsync",
                "off",
                "foo",
                "",
            ],
            Output => &["json", "json", "json", "human", "xml", "JSON", ""],
            Size => return Some(self.size()),
            Number => &["512", "4k", "1000", "64k", "0", "-1", "x", "1M", "3G"],
            CreateOptions => return Some(self.list(CREATE)),
            AmendOptions => return Some(self.list(AMEND)),
            MeasureOptions => return Some(self.list(MEASURE)),
            Snapshot => &["s1", "s1", "1", "2", "s2", "no such", "", "-x", "a,b", "ä"],
            LoadedSnapshot => &[
                "s1",
                "1",
                "nosuch",
                "snapshot.id=1",
                "snapshot.name=s1",
                "snapshot.id=1,snapshot.name=s1",
                "snapshot.id=2,snapshot.name=s1",
                "snapshot.foo=1",
                "",
            ],
            Bitmap => return Some(self.bitmap()),
            Granularity => &[
                "32k", "64k", "512", "2M", "2G", "4G", "1000", "0", "x", "-1",
            ],
            Repair => &["leaks", "all", "all", "foo", ""],
            Preallocation => &["off", "metadata", "falloc", "full", "foo"],
            Sparse => &["0", "4k", "64k", "512", "1000", "1", "x", "1T", "-1"],
            Coroutines => &["1", "8", "16", "0", "17", "x", "-1"],
            Rate => &["1G", "100M", "0", "x", "-1", "8E"],
            Pattern => &["0", "7", "255", "256", "-1", "x"],
            Count => &["1", "2", "20", "64", "0", "x", "-1"],
            Aio => &["threads", "native", "io_uring", "foo"],
            Object => &[
                "secret,id=s0,data=abc",
                "secret,id=s0",
                "secret,data=abc",
                "foo,id=x",
                "id=x",
                "",
            ],
        };
        Some((*self.rng.pick(choices)).to_string())
    }

    /// An image's name, or all that is said of it.
    pub fn image(&mut self) -> String {
        match self.rng.below(20) {
            0..14 => (*self.rng.pick(IMAGES)).to_string(),
            14 | 15 => (*self.rng.pick(ODDITIES)).to_string(),
            16 => {
                let (format, name) = self.format_and_name();
                format!("driver={format},file.filename={name}")
            }
            17 => {
                let (format, name) = self.format_and_name();
                format!(
                    r#"json:{{"driver":"{format}","file":{{"driver":"file","filename":"{name}"}}}}"#
                )
            }
            18 => (*self.rng.pick(&[
                "json:{}",
                "json:",
                "json:{\"driver\":\"qcow2\"}",
                "json:{'driver':'raw','file.filename':'a.raw'}",
                "driver=raw",
                "driver=qcow2,file.filename=img.qcow2,foo=1",
                "driver=raw,file.driver=file,file.filename=a.raw",
                "file.filename=img.qcow2",
                "driver=raw,file.filename=com,,ma.qcow2",
                "driver=nosuch,file.filename=a.raw",
            ]))
            .to_string(),
            _ => (*self.rng.pick(&["new.raw", "new.qcow2"])).to_string(),
        }
    }

    pub fn format_and_name(&mut self) -> (&'static str, &'static str) {
        let name = *self.rng.pick(IMAGES);
        let format = match (name.ends_with(".raw"), self.rng.once_in(6)) {
            (true, false) | (false, true) => "raw",
            (false, false) | (true, true) => "qcow2",
        };
        (format, name)
    }

    fn overlay(&mut self) -> String {
        match self.rng.below(4) {
            0 => self.image(),
            _ => (*self.rng.pick(&["top.qcow2", "mid.qcow2", "over.qcow2"])).to_string(),
        }
    }

    /// The name of a file that is not there yet, most times.
    fn new_file(&mut self) -> String {
        match self.rng.below(16) {
            0 => (*self.rng.pick(ODDITIES)).to_string(),
            1 => (*self.rng.pick(IMAGES)).to_string(),
            2 => "nosuch/x".to_string(),
            _ => (*self.rng.pick(&["new.raw", "new.qcow2", "ne,w"])).to_string(),
        }
    }

    fn target(&mut self) -> String {
        match self.rng.below(12) {
            0 => self.image(),
            1 => (*self
                .rng
                .pick(&["driver=raw,file.filename=new.raw", "dir", "nosuch/x"]))
            .to_string(),
            _ => (*self.rng.pick(&["new.raw", "new.qcow2"])).to_string(),
        }
    }

    fn bitmap(&mut self) -> String {
        (*self
            .rng
            .pick(&["b0", "b0", "b1", "b2", "nosuch", "", "a,b"]))
        .to_string()
    }

    fn size(&mut self) -> String {
        let sizes = [
            "1M",
            "1M",
            "2M",
            "512k",
            "100000",
            "1000",
            "1.5M",
            "3m",
            "0",
            "1",
            "512",
            "0x100000",
            "1.2345M",
            "4096b",
            "65K",
            "9E",
            "16E",
            "99999999999999999999",
            "-1",
            "x",
            "1x",
            "",
            " 1M",
            "+1M",
            "1 M",
            "1e6",
            ".5M",
            "1.",
            "0x",
            "1kk",
            "010000",
        ];
        (*self.rng.pick(&sizes)).to_string()
    }

    fn change_of_size(&mut self) -> String {
        let sign = *self.rng.pick(&["", "", "+", "+", "-", "-", "--", "+-"]);
        let size = self.size();
        format!("{sign}{size}")
    }

    fn dd_number(&mut self, name: &str) -> String {
        let choices: &[&str] = match name {
            "bs" => &[
                "512", "1k", "4k", "1M", "3", "1000", "0", "x", "-1", "8E", "", "64k",
            ],
            _ => &[
                "0",
                "1",
                "2",
                "3",
                "100",
                "1000",
                "1k",
                "x",
                "-1",
                "",
                "99999999999999999999",
            ],
        };
        (*self.rng.pick(choices)).to_string()
    }

    fn list(&mut self, options: &[&str]) -> String {
        let count = 1 + self.rng.below(3);
        let items: Vec<&str> = (0..count).map(|_| *self.rng.pick(options)).collect();
        match self.rng.below(25) {
            0 => format!("{},", items.join(",")),
            1 => format!(",{}", items.join(",")),
            2 => items.join(",,"),
            _ => items.join(","),
        }
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.rng.below(at as u64 + 1) as usize);
        }
    }

    /// A word too few, too many, or another.
    fn mangle(&mut self, words: &mut Vec<String>) {
        const STRANGERS: &[&str] = &[
            "-x",
            "--foo",
            "-",
            "--",
            "",
            "a.raw",
            "x",
            "-q",
            "--quiet=1",
            "--output",
            "-f",
            "=",
            "-o",
            "img.qcow2",
            "1M",
        ];
        if words.is_empty() {
            return;
        }
        let at = self.rng.below(words.len() as u64) as usize;
        match self.rng.below(4) {
            0 => drop(words.remove(at)),
            1 => words.insert(at, words[at].clone()),
            2 => words.insert(at, (*self.rng.pick(STRANGERS)).to_string()),
            _ => words[at] = (*self.rng.pick(STRANGERS)).to_string(),
        }
    }
}

/// Options of creation. Not `extent_size_hint`, which Debian's qemu-img does not pass to the file
/// system.
const CREATE: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=4k",
    "cluster_size=512",
    "cluster_size=2M",
    "cluster_size=3",
    "cluster_size=4M",
    "extended_l2=on",
    "extended_l2=off",
    "compat=0.10",
    "compat=1.1",
    "compat=v3",
    "compat=foo",
    "preallocation=off",
    "preallocation=metadata",
    "preallocation=falloc",
    "preallocation=full",
    "preallocation=foo",
    "lazy_refcounts",
    "lazy_refcounts=on",
    "nolazy_refcounts",
    "refcount_bits=1",
    "refcount_bits=64",
    "refcount_bits=3",
    "refcount_bits=x",
    "compression_type=zstd",
    "compression_type=foo",
    "size=2M",
    "size=x",
    "backing_file=base.qcow2",
    "backing_file=",
    "backing_fmt=qcow2",
    "backing_fmt=foo",
    "data_file=new.bin",
    "data_file_raw=on",
    "nocow=on",
    "help",
    "?",
    "foo",
    "foo=1",
    "",
];

const AMEND: &[&str] = &[
    "compat=0.10",
    "compat=1.1",
    "compat=v2",
    "compat=foo",
    "lazy_refcounts=on",
    "lazy_refcounts=off",
    "lazy_refcounts=x",
    "refcount_bits=1",
    "refcount_bits=8",
    "refcount_bits=64",
    "refcount_bits=7",
    "size=2M",
    "size=512k",
    "size=x",
    "backing_file=base.qcow2",
    "backing_fmt=qcow2",
    "data_file_raw=on",
    "data_file_raw=off",
    "data_file=x",
    "cluster_size=4k",
    "preallocation=full",
    "compression_type=zstd",
    "extended_l2=on",
    "encrypt.keyslot=0",
    "help",
    "foo=1",
];

const MEASURE: &[&str] = &[
    "cluster_size=4k",
    "cluster_size=512",
    "cluster_size=2M",
    "cluster_size=3",
    "extended_l2=on",
    "compat=0.10",
    "compat=foo",
    "preallocation=full",
    "preallocation=metadata",
    "preallocation=foo",
    "refcount_bits=1",
    "refcount_bits=64",
    "refcount_bits=3",
    "backing_file=base.qcow2",
    "backing_fmt=qcow2",
    "data_file=x",
    "data_file_raw=on",
    "size=1M",
    "lazy_refcounts=on",
    "help",
    "foo=1",
];

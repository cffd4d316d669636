//! Our check against qemu-img's, on sound images of every geometry and on broken ones.
//!
//! Skips loudly where qemu-img and qemu-io are not installed.

use crate::support::{COMPRESSED, COPIED, Image, peers_are_installed};
use cowslip_block::random::Random;

/// A sound image, before something is broken in it.
#[derive(Clone, Copy)]
struct Base {
    options: &'static str,
    size: &'static str,
    commands: &'static [&'static str],
    after: &'static [&'static [&'static str]],
}

const PLAIN: Base = Base {
    options: "",
    size: "64M",
    commands: &["write 0 256k"],
    after: &[],
};
const EXTENDED: Base = Base {
    options: "extended_l2=on",
    ..PLAIN
};
const PACKED: Base = Base {
    commands: &["write -c 0 64k", "write -c 64k 64k"],
    ..PLAIN
};
const EXTENDED_PACKED: Base = Base {
    options: "extended_l2=on",
    ..PACKED
};
const SNAPSHOT: Base = Base {
    after: &[&["snapshot", "-c", "s1", "image.qcow2"]],
    ..PLAIN
};
const BITMAP: Base = Base {
    after: &[&["bitmap", "--add", "-g", "64k", "image.qcow2", "b0"]],
    ..PLAIN
};
const DATA_FILE: Base = Base {
    options: "data_file=data.raw",
    ..PLAIN
};

impl Base {
    fn make(&self) -> Image {
        let mut image = Image::create(self.options, self.size, self.commands);
        for args in self.after {
            image.img(args);
        }
        if self.after == BITMAP.after {
            image.io(&["write 0 1M"]);
        }
        image
    }
}

/// Both checkers agree: exit code, every number, every line.
fn assert_agree(name: &str, image: &Image) {
    let theirs = image.qemu_check();
    let (ours, findings) = image.our_check();
    assert!(
        findings.iter().all(|f| f.is_known_to_qemu()),
        "{name}: {findings:?}"
    );
    if theirs.exit_code == 1 && theirs.numbers.is_empty() {
        // QEMU cannot open it; we may know more, but not that it is sound.
        assert_eq!(ours.exit_code, 1, "{name}: {findings:?}");
        return;
    }
    assert!(ours == theirs, "{name}: ours {ours:#?}\ntheirs {theirs:#?}");
}

type Break = fn(&mut Image);

/// Its name, the sound image, and what is done to it.
type Case = (&'static str, Base, Break);

fn check_all(cases: &[Case]) {
    if !peers_are_installed() {
        return;
    }
    for (name, base, change) in cases {
        check_broken(name, *base, change);
    }
}

/// Its name, and what is done to an image at a place.
type CaseAt = (&'static str, fn(&mut Image, u64));

/// The same for images of one kind, each with a change at one place.
fn check_at(base: Base, place: fn(&Image) -> u64, cases: &[CaseAt]) {
    if !peers_are_installed() {
        return;
    }
    for (name, change) in cases {
        check_broken(name, base, |image| change(image, place(image)));
    }
}

fn check_broken(name: &str, base: Base, change: impl FnOnce(&mut Image)) {
    let mut image = base.make();
    let sound = image.qemu_check();
    assert_eq!(
        (sound.exit_code, sound.lines.len()),
        (0, 0),
        "{name}: {sound:?}"
    );
    change(&mut image);
    assert_agree(name, &image);
}

#[test]
fn broken_mappings() {
    check_all(&[
        ("nothing broken", PLAIN, |_| {}),
        ("L2 reserved bits", PLAIN, |i| {
            i.map_word(i.l2(), |e| e | 1 << 57 | 4)
        }),
        ("L1 reserved bits", PLAIN, |i| {
            i.map_word(i.l1(), |e| e | 1 << 57)
        }),
        ("L1 entry unaligned", PLAIN, |i| {
            i.map_word(i.l1(), |e| e + 512)
        }),
        ("L1 entry beyond the end", PLAIN, |i| {
            i.set_word(i.l1(), COPIED | 1 << 40)
        }),
        ("L1 entry to the header", PLAIN, |i| {
            i.set_word(i.l1(), COPIED)
        }),
        ("L1 table too long", PLAIN, |i| i.set(36, 4, 100)),
        ("L1 table over the next clusters", PLAIN, |i| {
            i.set(36, 4, 10_000)
        }),
        ("L1 table too short", PLAIN, |i| i.set(36, 4, 0)),
        ("L1 table unaligned", PLAIN, |i| i.map_word(40, |o| o + 512)),
        ("L1 table beyond the end", PLAIN, |i| {
            i.set_word(40, 1 << 40)
        }),
        ("L1 without COPIED", PLAIN, |i| {
            i.map_word(i.l1(), |e| e & !COPIED)
        }),
        ("L2 entry beyond the end", PLAIN, |i| {
            i.set_word(i.l2(), COPIED | 1 << 40)
        }),
        ("L2 entry unaligned", PLAIN, |i| {
            i.map_word(i.l2(), |e| e + 1024)
        }),
        ("L2 entry unaligned zero", PLAIN, |i| {
            i.map_word(i.l2(), |e| (e + 1024) | 1)
        }),
        ("L2 entry lost", PLAIN, |i| i.set_word(i.l2(), 0)),
        ("L2 entry twice", PLAIN, |i| {
            i.set_word(i.l2() + 8, i.word(i.l2()))
        }),
        ("L2 entry to the header", PLAIN, |i| {
            i.set_word(i.l2(), COPIED)
        }),
        ("L2 entry to the L1 table", PLAIN, |i| {
            i.set_word(i.l2(), COPIED | i.l1())
        }),
        ("L2 without COPIED", PLAIN, |i| {
            i.map_word(i.l2(), |e| e & !COPIED)
        }),
        (
            "L2 table twice",
            Base {
                size: "1G",
                ..PLAIN
            },
            |i| i.set_word(i.l1() + 8, i.word(i.l1())),
        ),
    ]);
}

#[test]
fn broken_compressed_extended_and_external_clusters() {
    check_all(&[
        ("compressed COPIED", PACKED, |i| {
            i.map_word(i.l2(), |e| e | COPIED)
        }),
        ("compressed beyond the end", PACKED, |i| {
            i.map_word(i.l2(), |e| e | 1 << 40)
        }),
        ("compressed too long", PACKED, |i| {
            i.map_word(i.l2(), |e| e | 5 << 54)
        }),
        ("compressed bitmap", EXTENDED_PACKED, |i| {
            i.set_word(i.l2() + 8, 1)
        }),
        ("allocated and zero", EXTENDED, |i| {
            i.set_word(i.l2() + 8, 1 << 32 | 0xffff_ffff)
        }),
        ("allocated without offset", EXTENDED, |i| {
            i.set_word(i.l2() + 1608, 1)
        }),
        ("both without offset", EXTENDED, |i| {
            i.set_word(i.l2() + 1608, 1 << 32 | 1)
        }),
        ("extended unaligned", EXTENDED, |i| {
            i.map_word(i.l2(), |e| e + 512)
        }),
        ("extended unaligned preallocated", EXTENDED, |i| {
            i.map_word(i.l2(), |e| e + 512);
            i.set_word(i.l2() + 8, 0);
        }),
        ("extended unaligned, both", EXTENDED, |i| {
            i.map_word(i.l2(), |e| e + 512);
            i.set_word(i.l2() + 8, 1 << 32 | 0xffff_ffff);
        }),
        ("data file without COPIED", DATA_FILE, |i| {
            i.map_word(i.l2() + 8, |e| e & !COPIED)
        }),
        ("data file cluster 0 without COPIED", DATA_FILE, |i| {
            i.set_word(i.l2(), 0)
        }),
        ("data file compressed", DATA_FILE, |i| {
            i.set_word(i.l2() + 8, COMPRESSED | 0x10000)
        }),
        ("data file compressed COPIED", DATA_FILE, |i| {
            i.set_word(i.l2() + 8, COPIED | COMPRESSED | 0x10000)
        }),
        ("data file zero", DATA_FILE, |i| i.set_word(i.l2() + 8, 1)),
    ]);
}

#[test]
fn broken_refcounts() {
    check_all(&[
        ("refcount 0", PLAIN, |i| {
            i.set(i.refcount_block() + 10, 2, 0)
        }),
        ("refcount 2", PLAIN, |i| {
            i.set(i.refcount_block() + 10, 2, 2)
        }),
        ("refcounts mixed", PLAIN, |i| {
            i.set(i.refcount_block() + 10, 2, 2);
            i.set(i.refcount_block() + 12, 2, 0);
        }),
        (
            "refcount of 64 bits",
            Base {
                options: "refcount_bits=64",
                ..PLAIN
            },
            |i| i.set_word(i.refcount_block() + 40, (1 << 63) + 5),
        ),
    ]);
}

#[test]
fn broken_refcount_tables_and_files() {
    check_all(&[
        ("no refcount table", PLAIN, |i| i.set(56, 4, 0)),
        ("second refcount block not counted", PLAIN, |i| {
            i.set_word(i.refcount_table() + 8, i.bytes.len() as u64);
            i.bytes.extend([0; 65536]);
        }),
        ("refcount table of 2 clusters", PLAIN, |i| i.set(56, 4, 2)),
        ("refcount table beyond the end", PLAIN, |i| {
            i.set_word(48, 1 << 40)
        }),
        (
            "one bit, twice",
            Base {
                options: "refcount_bits=1",
                ..PLAIN
            },
            |i| {
                i.set_word(i.l2() + 8, i.word(i.l2()));
                i.set_word(i.l2() + 16, i.word(i.l2()));
            },
        ),
        (
            "four bits, often",
            Base {
                options: "refcount_bits=4",
                ..PLAIN
            },
            |i| {
                (0..20).for_each(|at| i.set_word(i.l2() + 8 * at, i.word(i.l2())));
            },
        ),
        ("dirty and behind", PLAIN, |i| {
            i.set_word(72, 1);
            i.set(i.refcount_block() + 14, 2, 0);
        }),
        ("marked corrupt", PLAIN, |i| i.set_word(72, 2)),
        ("cut in the middle", PLAIN, |i| i.bytes.truncate(0x60000)),
        ("cut in the last cluster", PLAIN, |i| {
            i.bytes.truncate(i.bytes.len() - 100)
        }),
        ("cut by a cluster", PLAIN, |i| {
            i.bytes.truncate(i.bytes.len() - 65536)
        }),
        ("cut by more than a cluster", PLAIN, |i| {
            i.bytes.truncate(i.bytes.len() - 65537)
        }),
        ("garbage behind the end", PLAIN, |i| {
            i.bytes.extend([7; 200_000])
        }),
        ("unknown feature", PLAIN, |i| i.set_word(72, 1 << 40)),
    ]);
    check_at(
        PLAIN,
        Image::refcount_table,
        &[
            ("no refcount block", |i, at| i.set_word(at, 0)),
            ("refcount table reserved bits", |i, at| {
                i.map_word(at, |e| e | 1)
            }),
            ("refcount block unaligned", |i, at| {
                i.map_word(at, |e| e | 512)
            }),
            ("refcount block outside", |i, at| i.set_word(at, 1 << 40)),
            ("second refcount block outside", |i, at| {
                i.set_word(at + 8, 1 << 40)
            }),
            ("refcount block twice", |i, at| {
                i.set_word(at + 8, i.refcount_block())
            }),
            ("refcount block is an L2 table", |i, at| {
                i.set_word(at + 8, i.l2())
            }),
        ],
    );
}

#[test]
fn broken_snapshots() {
    check_all(&[
        ("nothing broken", SNAPSHOT, |_| {}),
        ("too many snapshots", SNAPSHOT, |i| i.set(60, 4, 70_000)),
        ("one snapshot more", SNAPSHOT, |i| i.set(60, 4, 2)),
        ("many snapshots more", SNAPSHOT, |i| i.set(60, 4, 3000)),
        ("forgotten", SNAPSHOT, |i| i.set(60, 4, 0)),
        ("table unaligned", SNAPSHOT, |i| i.map_word(64, |o| o + 512)),
        ("table beyond the end", SNAPSHOT, |i| {
            i.set_word(64, 1 << 40)
        }),
        ("COPIED in a shared table", SNAPSHOT, |i| {
            i.map_word(i.l2(), |e| e | COPIED)
        }),
    ]);
    check_at(
        SNAPSHOT,
        Image::snapshots,
        &[
            ("L1 unaligned", |i, at| i.map_word(at, |o| o + 512)),
            ("L1 beyond the end", |i, at| i.set_word(at, 1 << 40)),
            ("L1 too large", |i, at| i.set(at + 8, 4, 0x7fff_ffff)),
            ("L1 empty", |i, at| i.set(at + 8, 4, 0)),
            ("too much extra data", |i, at| i.set(at + 36, 4, 5000)),
            ("no extra data", |i, at| i.set(at + 36, 4, 0)),
            ("too little extra data", |i, at| i.set(at + 36, 4, 8)),
            ("L1 entry lost", |i, at| i.set_word(i.word(at), 0)),
            ("L1 entry with COPIED", |i, at| {
                i.map_word(i.word(at), |e| e | COPIED)
            }),
        ],
    );
}

#[test]
fn broken_bitmaps() {
    check_all(&[("nothing broken", BITMAP, |_| {})]);
    check_at(
        BITMAP,
        Image::bitmap_directory,
        &[
            ("table beyond the end", |i, at| i.set_word(at, 1 << 40)),
            ("table unaligned", |i, at| i.map_word(at, |o| o + 8)),
            ("table too long", |i, at| i.set(at + 8, 4, 5000)),
            ("table empty", |i, at| i.set(at + 8, 4, 0)),
            ("table huge", |i, at| i.set(at + 8, 4, 0x7fff_ffff)),
            ("unknown type", |i, at| i.set(at + 16, 1, 7)),
            ("impossible granularity", |i, at| i.set(at + 17, 1, 70)),
            ("unknown flags", |i, at| i.set(at + 12, 4, 0xff0)),
            ("name too long", |i, at| i.set(at + 18, 2, 5000)),
            ("entry reserved bits", |i, at| {
                i.map_word(i.word(at), |e| e | 2)
            }),
            ("entry lost", |i, at| i.set_word(i.word(at), 0)),
            ("entry of ones with offset", |i, at| {
                i.map_word(i.word(at), |e| e | 1)
            }),
            ("entry beyond the end", |i, at| {
                i.set_word(i.word(at), 1 << 40)
            }),
        ],
    );
    check_at(
        BITMAP,
        Image::bitmaps_extension,
        &[
            ("directory beyond the end", |i, at| {
                i.set_word(at + 16, 1 << 40)
            }),
            ("directory unaligned", |i, at| {
                i.map_word(at + 16, |o| o + 512)
            }),
            ("one bitmap more", |i, at| i.set(at, 4, 2)),
            ("no bitmaps", |i, at| i.set(at, 4, 0)),
            ("directory too long", |i, at| i.map_word(at + 8, |n| n + 8)),
            ("directory too short", |i, at| i.set_word(at + 8, 8)),
            ("directory huge", |i, at| i.set_word(at + 8, 1 << 40)),
        ],
    );
}

/// Images that QEMU's check accepts and we refuse when the header is read.
#[test]
fn headers_that_are_refused_although_qemu_goes_on() {
    if !peers_are_installed() {
        return;
    }
    let cases: [(&str, Base, Break); 2] = [
        ("snapshots with a data file", DATA_FILE, |i| {
            i.set(60, 4, 1);
            i.set_word(64, i.l2());
        }),
        ("snapshot table in the header", SNAPSHOT, |i| {
            i.set_word(64, 0)
        }),
    ];
    for (name, base, change) in cases {
        let mut image = base.make();
        change(&mut image);
        assert_eq!(image.qemu_check().exit_code, 2, "{name}");
        assert_eq!(image.our_check().0.exit_code, 1, "{name}");
    }
}

/// Flaws that QEMU does not look for, and we do: one corruption more, all else the same.
#[test]
fn what_only_we_look_for() {
    if !peers_are_installed() {
        return;
    }
    let version_2 = Base {
        options: "compat=0.10",
        ..PLAIN
    };
    let cases: [(&str, Base, Break, &str); 6] = [
        (
            "zero flag in version 2",
            version_2,
            |i| i.map_word(i.l2(), |e| e | 1),
            "ERROR found l2 entry with a zero flag that its format lacks: 8000000000050001",
        ),
        (
            "zero flag of an extended entry",
            EXTENDED,
            |i| i.map_word(i.l2(), |e| e | 1),
            "ERROR found l2 entry with a zero flag that its format lacks: 8000000000050001",
        ),
        (
            "data file cluster elsewhere",
            DATA_FILE,
            |i| i.set_word(i.l2() + 160, COPIED | 0x10000),
            "ERROR offset=10000: Data file cluster is not at its guest offset 140000",
        ),
        (
            "data is the L1 table, with a count of 2",
            PLAIN,
            |i| {
                i.set_word(i.l2() + 160, i.l1());
                i.set(i.refcount_block() + 6, 2, 2);
            },
            "ERROR cluster 3 is the active L1 table and something else, too: reference=2",
        ),
        (
            "data is the L2 table, with a count of 2",
            PLAIN,
            |i| {
                i.set_word(i.l2() + 160, i.l2());
                i.map_word(i.l1(), |e| e & !COPIED);
                i.set(i.refcount_block() + 8, 2, 2);
            },
            "ERROR cluster 4 is an L2 table and something else, too: reference=2",
        ),
        (
            "data is the L1 table, with a count that is too high, a leak for QEMU",
            PLAIN,
            |i| {
                i.set_word(i.l2() + 160, i.l1());
                i.set(i.refcount_block() + 6, 2, 7);
            },
            "ERROR cluster 3 is the active L1 table and something else, too: reference=2",
        ),
    ];
    for (name, base, change, line) in cases {
        let mut image = base.make();
        change(&mut image);
        let mut theirs = image.qemu_check();
        assert!(matches!(theirs.exit_code, 0 | 3), "{name}: {theirs:?}");
        theirs.exit_code = 2;
        theirs.numbers.insert("corruptions".to_string(), 1);
        theirs.lines.insert(0, line.to_string());
        assert_eq!(image.our_check().0, theirs, "{name}");
    }
}

/// Sound images of every geometry, each with all that it can have.
#[test]
fn sound_images() {
    if !peers_are_installed() {
        return;
    }
    let clusters = [512, 4096, 16384, 65536, 131_072, 2_097_152];
    let widths = [1, 2, 4, 8, 16, 32, 64];
    let mut turn = 0;
    for cluster in clusters {
        for extended in [false, true] {
            if extended && cluster < 16384 {
                continue;
            }
            // Three widths for each geometry: every width meets every kind of feature.
            for step in 0..3 {
                let refcount_bits = widths[turn % 7];
                turn += 1;
                let features = match step {
                    0 => "compression_type=zstd",
                    1 => "lazy_refcounts=on",
                    _ => "preallocation=metadata",
                };
                let extended = if extended { "on" } else { "off" };
                let options = format!(
                    "cluster_size={cluster},extended_l2={extended},\
                     refcount_bits={refcount_bits},{features}"
                );
                let mut image = Image::create(&options, "9000k", &[]);
                image.io(&["write 100k 300k", "write 5M 4k", "write -z 6M 1M"]);
                if features.starts_with("comp") {
                    image.io(&["write -c 2M 2M"]);
                }
                // A shared cluster of compressed data needs a high count as it is.
                let compressed = features.starts_with("comp");
                if refcount_bits >= if compressed { 16 } else { 4 } {
                    image.img(&["snapshot", "-c", "one", "image.qcow2"]);
                    image.io(&["write 200k 50k", "discard 5M 2M"]);
                    image.img(&["snapshot", "-c", "two", "image.qcow2"]);
                }
                image.img(&["bitmap", "--add", "-g", "64k", "image.qcow2", "b0"]);
                image.io(&["write 0 70k"]);
                assert_agree(&options, &image);
                assert_eq!(image.our_check().0.exit_code, 0, "{options}");
            }
        }
    }
    assert_eq!(turn, (6 + 4) * 3);
}

#[test]
fn sound_images_with_other_files() {
    if !peers_are_installed() {
        return;
    }
    for options in [
        "data_file=data.raw",
        "data_file=data.raw,data_file_raw=on",
        "data_file=data.raw,extended_l2=on",
        "compat=0.10",
    ] {
        let image = Image::create(options, "64M", &["write 1M 3M", "write 10M 512"]);
        assert_agree(options, &image);
        assert_eq!(image.our_check().0.exit_code, 0, "{options}");
    }
    let mut image = Image::create("", "64M", &["write 1M 3M"]);
    std::fs::write(image.dir().join("base.raw"), [0; 1 << 20]).unwrap();
    image.img(&["rebase", "-u", "-b", "base.raw", "-F", "raw", "image.qcow2"]);
    image.io(&["write 100k 512"]);
    assert_agree("backing", &image);
    for size in ["0", "100000"] {
        let commands: &[&str] = if size == "0" { &[] } else { &["write 0 512"] };
        assert_agree(size, &Image::create("", size, commands));
    }
}

/// Random changes of metadata: the checkers agree, but for what only we look for.
#[test]
fn random_damage() {
    if !peers_are_installed() {
        return;
    }
    let seed: u64 = std::env::var("SEED").map_or(1, |seed| seed.parse().unwrap());
    let bases = [
        Base {
            options: "cluster_size=4096",
            ..SNAPSHOT
        },
        Base {
            options: "cluster_size=16384,extended_l2=on,refcount_bits=8",
            ..SNAPSHOT
        },
        Base {
            options: "cluster_size=512,refcount_bits=2",
            size: "300k",
            ..PACKED
        },
        Base {
            options: "cluster_size=4096,refcount_bits=64",
            ..BITMAP
        },
    ];
    let mut numbers = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut random = move |below: u64| numbers.next() % below;
    let mut outcomes = std::collections::BTreeMap::new();
    for (number, base) in bases.iter().enumerate() {
        let sound = Base {
            commands: &["write 0 64k", "write -c 128k 32k", "write 200k 4k"],
            ..*base
        };
        let sound = sound.make();
        for round in 0..40 {
            let mut image = sound.copy();
            for _ in 0..=random(3) {
                damage(&mut image, &mut random);
            }
            let name = format!("SEED={seed} base {number} round {round}");
            let theirs = image.qemu_check();
            let (ours, findings) = image.our_check();
            *outcomes.entry(theirs.exit_code).or_insert(0) += 1;
            if findings.iter().any(|f| !f.is_known_to_qemu()) || ours.exit_code == 1 {
                // One of the differences that the other tests list.
                assert_ne!(ours.exit_code, 0, "{name}");
                continue;
            }
            assert!(ours == theirs, "{name}: ours {ours:#?}\ntheirs {theirs:#?}");
        }
    }
    assert!(outcomes[&2] > 50, "{outcomes:?}");
}

/// Changes a word of one of the tables.
fn damage(image: &mut Image, random: &mut impl FnMut(u64) -> u64) {
    let tables = [
        image.l1(),
        image.l2(),
        image.refcount_table(),
        image.refcount_block(),
    ];
    let table = tables[random(4) as usize];
    let at = table + random(20) * 8;
    if at + 8 > image.bytes.len() as u64 {
        return;
    }
    let cluster = 1 << image.get(20, 4);
    let file_clusters = image.bytes.len() as u64 / cluster + 2;
    let word = match random(5) {
        0 => image.word(at) ^ 1 << random(64),
        1 => COPIED | (random(file_clusters) * cluster),
        2 => random(file_clusters) * cluster,
        3 => 0,
        _ => image.word(table),
    };
    image.set_word(at, word);
}

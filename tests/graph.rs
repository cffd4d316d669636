//! Lines of nodes that scripts describe: copies that reads make, writes that are compressed, an
//! image as the file of an image, another data file, and backing files that are described or behind
//! a server. The same command lines with QEMU's programs give the same text, and images in the same
//! state.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::golden::words;
use crate::support::rng::Rng;
use crate::support::server::Server;
use crate::support::whose::Whose;
use crate::support::{
    cowslip, outcome, peers_are_installed, run, scratch, scratch_beside, succeeds,
};

const QEMU: &[&str] = &["qemu-io", "qemu-img", "qemu-nbd"];

impl Whose {
    /// QEMU's program of this name, or ours called so.
    fn called(self, name: &str, at: &Path) -> Command {
        let mut command = match self {
            Whose::Theirs => Command::new(name),
            Whose::Ours => {
                let mut command = cowslip();
                command.arg0(name);
                command
            }
        };
        command.current_dir(at).stdin(Stdio::null());
        command
    }

    /// Returns its output, without times and sizes on the host, and its exit status.
    fn answer(self, at: &Path, words: &[&str]) -> (String, Option<i32>) {
        let output = outcome(self.called(words[0], at).args(&words[1..]));
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        let timeless = text.lines().filter_map(|line| {
            let is_shown = !line.contains("disk size") && !line.contains("actual-size");
            let end = line.find(" ops; ").map_or(line.len(), |at| at + 4);
            is_shown.then(|| line[..end].to_string())
        });
        let lines: Vec<String> = timeless.collect();
        (lines.join("\n"), output.status.code())
    }
}

const BOTH: [Whose; 2] = [Whose::Theirs, Whose::Ours];

fn qemu(at: &Path, words: &[&str]) -> String {
    run(Command::new(words[0]).current_dir(at).args(&words[1..]))
}

/// The same words of both on the same files.
fn same(at: &Path, words: &[&str]) -> String {
    let theirs = Whose::Theirs.answer(at, words);
    assert_eq!(Whose::Ours.answer(at, words), theirs, "{words:?}");
    theirs.0
}

/// `base` with data at its beginning, `mid` on it, and the empty `top` on that, made with
/// `options`.
fn make_chain(at: &Path, options: &str) {
    qemu(at, &words("qemu-img create -q -f qcow2 base 2M"));
    qemu(
        at,
        &[
            "qemu-io",
            "-f",
            "qcow2",
            "-c",
            "write -q -P 1 0 700k",
            "base",
        ],
    );
    for (name, below, options) in [("mid", "base", "compat=1.1"), ("top", "mid", options)] {
        let create = [
            "qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-o", options,
        ];
        qemu(at, &[&create[..], &["-b", below, name]].concat());
    }
    let writes = ["-c", "write -q -P 2 128k 64k", "-c", "write -q -z 256k 64k"];
    qemu(
        at,
        &[&["qemu-io", "-f", "qcow2"][..], &writes, &["mid"]].concat(),
    );
}

#[test]
fn what_reads_copy_is_what_qemu_copies() {
    if !peers_are_installed(QEMU) {
        return;
    }
    let bottom = "driver=copy-on-read,bottom=m,file.driver=qcow2,file.file.filename=top,\
                  file.backing.node-name=m";
    let all = "driver=copy-on-read,file.driver=qcow2,file.file.filename=top";
    for options in [
        "compat=1.1",
        "compat=0.10",
        "extended_l2=on",
        "cluster_size=4k",
    ] {
        for how in [
            &words("-f qcow2 -C top")[..],
            &["--image-opts", all],
            &["--image-opts", bottom],
        ] {
            let mut states = Vec::new();
            for whose in BOTH {
                let at = &scratch();
                make_chain(at, options);
                let mut lines = vec!["qemu-io"];
                for line in [
                    "write -q -P 3 80k 3k",
                    "read -P 1 0 1000",
                    "read 100k 60k",
                    "read 250k 80k",
                    "read -P 1 600k 512",
                    "read 690k 300k",
                    "read -P 0 2097151 1",
                    "read 0 0",
                ] {
                    lines.extend(["-c", line]);
                }
                lines.extend(how);
                let answer = whose.answer(at, &lines);
                let map = qemu(at, &words("qemu-io -f qcow2 -c map top"));
                qemu(at, &words("qemu-img check -q top"));
                succeeds(at, "check -q top");
                let content = qemu(at, &["qemu-io", "-f", "qcow2", "-c", "read -v 0 2M", "top"]);
                let content = content
                    .lines()
                    .filter(|line| !line.contains("ops"))
                    .collect::<String>();
                // Which zeroes have no space is our choice: we examine every cluster.
                states.push((answer, map, content));
            }
            assert_eq!(states[1], states[0], "{options} {how:?}");
        }
    }
}

#[test]
fn what_is_written_through_compress_is_stored_compressed() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    make_chain(at, "cluster_size=16k");
    qemu(at, &words("qemu-img convert -O raw top expected"));
    let list = "driver=compress,file.driver=qcow2,file.file.filename=top";
    let mut rng = Rng::named(1, "compress");
    let mut lines = Vec::new();
    for _ in 0..30 {
        let start = rng.below(1900) * 1024;
        let line = match rng.below(4) {
            0 => format!("write -q -z {start} {}", rng.below(64 << 10) + 1),
            kind => format!(
                "aio_write -q -P {} {start} {}",
                10 + kind,
                rng.below(100 << 10) + 1
            ),
        };
        lines.extend(["-c".to_string(), line.replace("aio_write", "write")]);
    }
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    run(Whose::Ours
        .called("qemu-io", at)
        .arg("--image-opts")
        .args(&lines)
        .arg(list));
    qemu(
        at,
        &[&["qemu-io", "-f", "raw"][..], &lines, &["expected"]].concat(),
    );
    qemu(at, &words("qemu-img compare -f qcow2 -F raw top expected"));
    qemu(at, &words("qemu-img check -q top"));
    let json = qemu(at, &words("qemu-img map --output=json top"));
    let stored = |line: &&str| line.contains("\"depth\": 0") && line.contains("\"data\": true");
    let lines: Vec<&str> = json.lines().filter(stored).collect();
    assert!(lines.len() > 4, "{json}");
    assert!(
        lines
            .iter()
            .all(|line| line.contains("\"compressed\": true")),
        "{json}"
    );
}

#[test]
fn an_image_is_the_file_of_an_image() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    // The disk of `outer` holds `inner`, which grows while it is written.
    qemu(at, &words("qemu-img create -q -f qcow2 inner 4M"));
    qemu(at, &words("qemu-img create -q -f qcow2 outer 8M"));
    qemu(
        at,
        &words("qemu-img convert -n -f raw -O qcow2 inner outer"),
    );
    let list = "driver=qcow2,file.driver=qcow2,file.file.filename=outer";
    let json = r#"json:{"driver":"raw","file":{"driver":"qcow2","file":{"driver":"qcow2","file":{"filename":"outer"}}}}"#;
    let write = [
        "qemu-io",
        "--image-opts",
        "-c",
        "write -P 5 1M 1M",
        "-c",
        "discard 1280k 64k",
        list,
    ];
    assert_eq!(Whose::Ours.answer(at, &write).1, Some(0));
    qemu(at, &words("qemu-img check -q outer"));
    same(at, &["qemu-img", "check", "--image-opts", list]);
    let reads = ["qemu-io", "-c", "read -P 5 1M 256k", "-c", "read -P 0 0 1M"];
    for source in [&["--image-opts", list][..], &[json]] {
        same(at, &[&reads[..], source].concat());
        let convert = ["qemu-img", "convert", "-O", "raw"];
        same(at, &[&convert[..], source, &["out"]].concat());
        let out = std::fs::read(at.join("out")).unwrap();
        assert_eq!(out.len(), 4 << 20);
        assert!(out[1 << 20..][..256 << 10].iter().all(|&byte| byte == 5));
    }
    same(
        at,
        &["qemu-img", "map", "--output=json", "--image-opts", list],
    );
    // Above a format, faults are those of its disk.
    let rules = "driver=blkdebug,image.driver=qcow2,image.file.filename=outer,\
                 inject-error.0.event=none,inject-error.0.sector=8";
    same(
        at,
        &[
            "qemu-io",
            "--image-opts",
            "-c",
            "read 0 4k",
            "-c",
            "read 4k 512",
            "-c",
            "read 8k 4k",
            rules,
        ],
    );
}

#[test]
fn the_data_file_is_the_one_in_the_options() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    qemu(
        at,
        &words("qemu-img create -q -f qcow2 -o data_file=d1 a 1M"),
    );
    qemu(at, &words("qemu-img create -q -f qcow2 plain 1M"));
    for (number, data) in [
        ("d2", "data-file.driver=file,data-file.filename=d2"),
        ("d3", "data-file.filename=d3"),
    ] {
        std::fs::File::create(at.join(number))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        let list = format!("driver=qcow2,file.filename=a,{data}");
        same(
            at,
            &[
                "qemu-io",
                "--image-opts",
                "-c",
                "write -P 6 64k 64k",
                "-c",
                "read -P 6 64k 64k",
                &list,
            ],
        );
        let written = std::fs::read(at.join(number)).unwrap();
        assert!(
            written[64 << 10..128 << 10].iter().all(|&byte| byte == 6),
            "{number}"
        );
    }
    assert!(
        std::fs::read(at.join("d1"))
            .unwrap()
            .iter()
            .all(|&byte| byte == 0)
    );
    for list in [
        "driver=qcow2,file.filename=a,data-file.driver=null-co,data-file.size=1M",
        "driver=qcow2,file.filename=a,data-file.driver=raw,data-file.file.driver=blkdebug,\
         data-file.file.inject-error.0.event=write_aio,data-file.file.inject-error.0.once=on,data-file.file.image.filename=d2",
        "driver=qcow2,file.filename=plain,data-file.driver=null-co",
        "driver=qcow2,file.filename=a,data-file.filename=nowhere",
    ] {
        same(at, &["qemu-io", "--image-opts", "-c", "write 0 64k", list]);
    }
}

/// `mid`, as scripts describe it.
const MID: &str = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"mid"}}"#;

#[test]
fn backing_files_are_described() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    make_chain(at, "compat=1.1");
    let described = [
        (MID, "qcow2"),
        (
            r#"json:{"driver":"qcow2","file":{"driver":"blkdebug","image":{"driver":"file","filename":"mid"}}}"#,
            "qcow2",
        ),
        (
            r#"json:{"driver":"raw","offset":65536,"size":131072,"file":{"filename":"base"}}"#,
            "raw",
        ),
    ];
    for (name, format) in described {
        let create = [
            "qemu-img", "create", "-f", "qcow2", "-F", format, "-b", name, "over",
        ];
        same(at, &create);
        same(
            at,
            &["qemu-img", "rebase", "-u", "-F", format, "-b", name, "over"],
        );
        if format == "qcow2" {
            same(at, &words("qemu-img map --output=json over"));
        }
        same(at, &["qemu-img", "info", "over"]);
        same(
            at,
            &[
                "qemu-io",
                "-f",
                "qcow2",
                "-c",
                "write -P 9 64k 1k",
                "-c",
                "read -v 60k 8k",
                "over",
            ],
        );
        same(at, &words("qemu-img convert -O raw over out"));
        same(at, &["qemu-img", "check", "over"]);
    }
}

#[test]
fn a_described_backing_file_is_committed_to_as_far_as_it_may_be_followed() {
    let Some(directory) = scratch_beside(QEMU) else {
        return;
    };
    let at = directory.path();
    make_chain(at, "compat=1.1");
    same(
        at,
        &["qemu-img", "rebase", "-u", "-F", "qcow2", "-b", MID, "top"],
    );
    same(at, &words("qemu-img info --backing-chain top"));
    qemu(
        at,
        &["qemu-io", "-f", "qcow2", "-c", "write -q -P 8 0 64k", "top"],
    );
    assert_eq!(
        Whose::Ours.answer(at, &["qemu-img", "commit", "top"]).1,
        Some(0)
    );
    qemu(
        at,
        &["qemu-io", "-f", "qcow2", "-c", "read -P 8 0 64k", "mid"],
    );
    // Options of an image are not allowed in JSON that stands for a mere file name here.
    let more = r#"json:{"driver":"qcow2","backing":null,"file":{"filename":"mid"}}"#;
    qemu(
        at,
        &["qemu-img", "rebase", "-u", "-F", "qcow2", "-b", more, "top"],
    );
    let (text, code) = Whose::Ours.answer(at, &["qemu-img", "map", "top"]);
    assert!(
        code == Some(1) && text.contains("'backing' in the description"),
        "{text}"
    );
    let forbidden = [
        "convert",
        "--backing-policy",
        "same-directory",
        "-O",
        "raw",
        "top",
        "out",
    ];
    let output = outcome(cowslip().current_dir(at).args(forbidden));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("forbids that: it does not name a file"),
        "{text}"
    );
}

#[test]
fn an_image_that_describes_itself_is_refused_in_one_line() {
    let at = &scratch();
    let ours = |words: &[&str]| run(cowslip().current_dir(at).args(words));
    ours(&words("create -q -f qcow2 loop 1M"));
    // Its disk, which is opened to find its backing file, has that backing file.
    for name in [
        r#"json:{"driver":"raw","file":{"driver":"qcow2","file":{"filename":"loop"}}}"#,
        r#"json:{"driver":"qcow2","file":{"filename":"loop"}}"#,
    ] {
        run(Whose::Ours
            .called("qemu-img", at)
            .args(["rebase", "-u", "-F", "raw", "-b", name, "loop"]));
        for words in [&["map", "loop"][..], &words("convert -O raw loop out")] {
            let output = outcome(cowslip().current_dir(at).args(words));
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let is_told = output.status.code() == Some(1) && text.lines().count() == 1;
            assert!(is_told || output.status.success(), "{words:?}: {text}");
            assert!(text.len() < 4096, "{text}");
        }
    }
}

/// QEMU's server of an image.
fn serve(at: &Path, image: &str) -> Server {
    let socket = at.join("socket");
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-r", "--shared=8", "-f", "qcow2", "-k"]);
    Server::start(command.current_dir(at).arg(&socket).arg(image), &socket)
}

#[test]
fn a_backing_file_is_behind_a_server() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    make_chain(at, "compat=1.1");
    let socket = at.join("socket").display().to_string();
    let name = format!("nbd:unix:{socket}");
    let uri = format!("nbd+unix:///?socket={socket}");
    let server = serve(at, "base");
    same(
        at,
        &[
            "qemu-img", "create", "-f", "qcow2", "-F", "raw", "-b", &name, "over",
        ],
    );
    for name in [&uri, &name] {
        same(
            at,
            &["qemu-img", "rebase", "-u", "-F", "raw", "-b", name, "over"],
        );
        same(
            at,
            &["qemu-io", "-f", "qcow2", "-c", "read -P 1 0 700k", "over"],
        );
        same(at, &words("qemu-img map --output=json over"));
        same(at, &words("qemu-img compare over base"));
        same(at, &words("qemu-img convert -O raw over out"));
        let chain = succeeds(at, "info --backing-chain over");
        assert!(chain.contains(&format!("image: {name}")), "{chain}");
    }
    drop(server);
    same(at, &["qemu-img", "map", "over"]);
    same(at, &words("qemu-img info --backing-chain over"));
}

#[test]
fn what_is_wrong_is_told_in_qemus_words() {
    let Some(at) = &scratch_beside(QEMU) else {
        return;
    };
    make_chain(at, "compat=1.1");
    std::fs::File::create(at.join("r"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    for list in [
        "driver=compress,file.driver=raw,file.file.filename=r",
        "driver=compress,file.driver=qcow2,file.file.filename=top,foo=1",
        "driver=compress",
        "driver=copy-on-read",
        "driver=copy-on-read,foo=1,file.driver=qcow2,file.file.filename=top",
        "driver=copy-on-read,bottom=x,file.driver=qcow2,file.file.filename=top",
    ] {
        same(at, &["qemu-io", "-c", "length", "--image-opts", list]);
    }
    let list = "driver=copy-on-read,file.driver=qcow2,file.file.filename=top";
    same(at, &["qemu-io", "-r", "-c", "length", "--image-opts", list]);
    same(at, &["qemu-img", "info", "--image-opts", list]);
    same(
        at,
        &[
            "qemu-img",
            "convert",
            "-O",
            "raw",
            "--image-opts",
            list,
            "out",
        ],
    );
    same(at, &words("qemu-io -C -r -c length top"));
    same(at, &["qemu-io", "-C", "-f", "raw", "-c", "read 0 512", "r"]);
    let null = "json:{'driver': 'null-co', 'size': 65536}";
    let answer = BOTH.map(|whose| {
        whose
            .answer(at, &["qemu-io", "-f", "null-co", "-c", "info", null])
            .0
    });
    assert_eq!(answer[1], answer[0]);
}

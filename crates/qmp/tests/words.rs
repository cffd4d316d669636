//! Options of a command line, read by the schema, beside qemu-storage-daemon.

use std::process::{Command, Stdio};

use cowslip_qmp::Schema;
use serde_json::{Value, json};

/// The type that an option is of, and the name that its first value may go without.
fn kind_of(option: &str) -> (&'static str, Option<&'static str>) {
    match option {
        "blockdev" => ("BlockdevOptions", Some("driver")),
        "export" => ("BlockExportOptions", Some("type")),
        "object" => ("ObjectOptions", Some("qom-type")),
        "nbd-server" => ("NbdServerOptions", None),
        "monitor" => ("MonitorOptions", Some("chardev")),
        _ => panic!("{option}"),
    }
}

fn read(option: &str, text: &str) -> Result<Value, String> {
    let (kind, implied) = kind_of(option);
    let object = Schema::of_daemon().object_of_text(kind, implied, text);
    object.map(Value::from).map_err(|error| error.desc)
}

/// Options that both refuse.
const REFUSED: &str = r#"
blockdev foo
blockdev foo,bar
blockdev driver
blockdev driver=
blockdev =x
blockdev
blockdev ,driver=null-co
blockdev null-co,=x
blockdev driver=file
blockdev driver=file,filename=x,,y,locking=maybe
blockdev driver=null-co,,node-name=n
blockdev driver=null-co,driver=file
blockdev driver=null-co,node-name=n,read-zeroes
blockdev driver=null-co,node-name=n,noread-zeroes
blockdev driver=null-co,node-name=n,size=1M
blockdev driver=null-co,node-name=n,size=x
blockdev driver=null-co,node-name=n,size=
blockdev driver=null-co,node-name=n,size=1.5
blockdev driver=null-co,node-name=n,size=08
blockdev driver=null-co,node-name=n,size=0x
blockdev driver=null-co,node-name=n,size=--1
blockdev driver=null-co,node-name=n,size=99999999999999999999
blockdev driver=null-co,node-name=n,latency-ns=1k
blockdev driver=null-co,node-name=n,latency-ns=18446744073709551616
blockdev driver=null-co,node-name=n,read-zeroes=1
blockdev driver=null-co,node-name=n,read-zeroes=Yes
blockdev driver=null-co,node-name=n,read-zeroes=
blockdev driver=null-co,node-name=n,size.x=1
blockdev driver=null-co,node-name=n,size.0=1
blockdev driver=null-co,node-name=n,discard.x=1
blockdev driver=null-co,node-name=n,node-name.x=1
blockdev driver=null-co,node-name=n,cache=x
blockdev driver=null-co,node-name=n,cache.direct=on,cache=x
blockdev driver=null-co,node-name=n,cache=x,cache.direct=on
blockdev driver=null-co,driver.x=1
blockdev driver.x=1,driver=null-co
blockdev driver=null-co,1a=x
blockdev driver=null-co,_a=x
blockdev driver=null-co,__x_a=x
blockdev driver=null-co,a b=x
blockdev driver=null-co,a..b=x
blockdev driver=null-co,.a=x
blockdev driver=null-co,a.=x
blockdev driver=null-co,0=x
blockdev driver=null-co,a.00=x
blockdev driver=null-co,a.99999999999999999999=x
blockdev driver=qcow2,file.driver=file
blockdev driver=qcow2,file.driver=null-co,x.y=1
blockdev driver=qcow2,file.driver=file,file=n
blockdev driver=qcow2,file.0=n
blockdev driver=qcow2,file=n,overlap-check.template=y
blockdev driver=qcow2,file=n,overlap-check.0=y
blockdev driver=qcow2,file=n,overlap-check=y
blockdev driver=blkdebug,image=n,inject-error.0.event=read_aio,inject-error.1.event=foo
blockdev driver=blkdebug,image=n,inject-error.0.event=read_aio,inject-error.2.event=read_aio
blockdev driver=blkdebug,image=n,inject-error=x
blockdev driver=blkdebug,image=n,inject-error.x=y
blockdev driver=blkdebug,image=n,inject-error.0.x=y
blockdev driver=blkdebug,image=n,inject-error.0.event=none,inject-error.0.errno=x
blockdev driver=blkdebug,image=n,take-child-perms.0=x
blockdev driver=blkdebug,image=n,max-transfer=4294967296
blockdev driver=nbd,server.type=inet,server.host=h
blockdev driver=nbd,server=x
blockdev {"driver":"null-co","size":"1"}
blockdev {"driver":"null-co"
blockdev {"driver":"blkdebug","image":"n","inject-error":[{}]}
blockdev []
export nbd,id=e
export foo
export id=e
export nbd,id=e,node-name=n,writable.x=1
blockdev blkdebug,node-name=n,image=m,set-state.0.event=none,set-state.0.new_state=1,set-state.1.event=x
blockdev blkdebug,node-name=n,image=m,set-state.0.event=none,set-state.0.new_state=1,set-state.1.event=none
blockdev blkdebug,node-name=n,image=m,set-state=a
blockdev blkdebug,node-name=n,image=m,set-state.0.event=none,set-state.x=b
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,logical-block-size=x
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,logical-block-size=-1
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,logical-block-size=1.5
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,logical-block-size=4kB
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,logical-block-size=0x10k
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,logical-block-size=16E
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,num-queues=70000
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,num-queues=x
export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=p,num-queues=-1
nbd-server addr.type=unix
nbd-server addr.type=unix,addr.path=p,max-connections=x
nbd-server addr=x
object secret
object secret,id=s,data=x,format=y
object foo,id=x
object id=x
object iothread,id=i,poll-max-ns=x
object authz-list,id=a,rules.0.match=*,rules.0.policy=maybe
monitor chardev=x,mode=foo
monitor mode=control
"#;

#[test]
fn options_are_refused_in_the_same_words() {
    const PROGRAM: &str = "qemu-storage-daemon";
    let installed = Command::new(PROGRAM).arg("--version").output().is_ok();
    if !installed {
        eprintln!("SKIPPED: {PROGRAM} is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut long = String::from("driver=null-co,");
    long.extend(std::iter::repeat_n('a', 128));
    let long = format!(
        "blockdev {long}=x\nblockdev {}=x\n",
        long.replace(",a", ",b.a")
    );
    for line in REFUSED
        .lines()
        .chain(long.lines())
        .filter(|line| !line.is_empty())
    {
        let (option, text) = line.split_once(' ').unwrap_or((line, ""));
        let error = read(option, text).expect_err(line);
        if !installed {
            continue;
        }
        let option = format!("--{option}");
        let output = Command::new(PROGRAM)
            .args([&option, text])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let expected = format!("{PROGRAM}: {option} {text}: {error}\n");
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected, "{line}");
    }
}

#[test]
fn options_become_values_of_their_types() {
    for (option, text, value) in [
        (
            "blockdev",
            "null-co,node-name=a,,b=c,size=0x10,latency-ns=-1,read-zeroes=on,",
            json!({
                "driver": "null-co", "node-name": "a,b=c", "size": 16,
                "latency-ns": u64::MAX, "read-zeroes": true,
            }),
        ),
        (
            "blockdev",
            "driver=null-co,driver=qcow2,file.filename=x,file.driver=file,backing=,\
             cache.direct=y,cache.no-flush=n,l2-cache-size= +010",
            json!({
                "driver": "qcow2", "file": {"filename": "x", "driver": "file"}, "backing": "",
                "cache": {"direct": true, "no-flush": false}, "l2-cache-size": 8,
            }),
        ),
        (
            "blockdev",
            "blkdebug,image=n,inject-error.1.event=none,inject-error.0.event=read_aio,\
             inject-error.1.once=off",
            json!({
                "driver": "blkdebug", "image": "n",
                "inject-error": [{"event": "read_aio"}, {"event": "none", "once": false}],
            }),
        ),
        (
            "blockdev",
            "{'driver': 'null-co', 'size': 5}",
            json!({"driver": "null-co", "size": 5}),
        ),
        (
            "export",
            "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=3,logical-block-size=1.5k",
            json!({
                "type": "vhost-user-blk", "id": "e", "node-name": "n",
                "addr": {"type": "unix", "path": "3"}, "logical-block-size": 1536,
            }),
        ),
        (
            "blockdev",
            "blkdebug,node-name=n,image=m,set-state.1.event=read_aio,set-state.1.new_state=2,\
             set-state.0.event=none,set-state.0.new_state=0x10",
            json!({
                "driver": "blkdebug", "node-name": "n", "image": "m",
                "set-state": [
                    {"event": "none", "new_state": 16},
                    {"event": "read_aio", "new_state": 2},
                ],
            }),
        ),
        (
            "monitor",
            "c,pretty=on",
            json!({"chardev": "c", "pretty": true}),
        ),
    ] {
        assert_eq!(read(option, text), Ok(value), "{option} {text}");
    }
    let deep = format!("null-co,{}x=1", "a.".repeat(100_000));
    assert_eq!(
        read("blockdev", &deep).unwrap_err(),
        "Parameter 'a' has too many parts"
    );
    let chain = "qcow2,file=f,".to_string() + &"backing.".repeat(500) + "driver=raw";
    assert!(
        read("blockdev", &chain)
            .unwrap_err()
            .ends_with(".driver' is missing")
    );
}

#[test]
fn words_become_arguments_of_a_command() {
    let schema = Schema::of_daemon();
    let read = |command: &str, words: &[&str]| {
        let command = schema.command(command).unwrap();
        let arguments = schema.arguments_of_words(command, words.iter().copied());
        arguments.map(Value::from).map_err(|error| error.desc)
    };
    let resize = read("block_resize", &["node-name=a,b", "size=1024"]);
    assert_eq!(resize, Ok(json!({"node-name": "a,b", "size": 1024})));
    let merge = read(
        "block-dirty-bitmap-merge",
        &["node=n", "target=t", "bitmaps:=['a', 'b']"],
    );
    assert_eq!(
        merge,
        Ok(json!({"node": "n", "target": "t", "bitmaps": ["a", "b"]}))
    );
    for (words, error) in [
        (
            &["node-name"][..],
            "Expected '=' after parameter 'node-name'",
        ),
        (
            &["size:=[1"],
            "Parameter 'size': JSON parse error, premature EOI",
        ),
        (
            &["size:=true"],
            "Invalid parameter type for 'size', expected: integer",
        ),
        (&["size=all"], "Parameter 'size' expects integer"),
        (&[], "Parameter 'size' is missing"),
    ] {
        assert_eq!(read("block_resize", words), Err(error.into()), "{words:?}");
    }
}

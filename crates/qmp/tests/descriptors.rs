//! Descriptors that travel with commands.

use std::fs::{self, File, OpenOptions};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use cowslip_qmp::client::{ClientError, DESCRIPTORS_MAX};
use cowslip_qmp::json::parse;
use cowslip_qmp::{Client, ServerOptions};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

use crate::qemu::Peer;
use crate::support::Served;

fn refused(result: Result<Value, ClientError>) -> String {
    match result {
        Err(ClientError::Refused(error)) => error.desc,
        other => panic!("{other:?}"),
    }
}

/// The length of a file that the handler has opened or taken.
fn length(client: &mut Client, name: &str) -> String {
    refused(client.execute("blockdev-del", json!({"node-name": name})))
}

#[test]
fn a_descriptor_is_kept_by_name_for_its_connection() {
    let served = Served::new(ServerOptions::default());
    let mut client = Client::connect(&served.path, None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |bytes: usize| {
        let path = dir.path().join("file");
        fs::write(&path, vec![0; bytes]).unwrap();
        File::open(&path).unwrap()
    };
    let none = "No file descriptor supplied via SCM_RIGHTS";
    assert_eq!(
        refused(client.execute("getfd", json!({"fdname": "a"}))),
        none
    );
    let keep = |client: &mut Client, name: &str, bytes: usize| {
        let file = file(bytes);
        let result = client.execute_passing("getfd", json!({"fdname": name}), &[file.as_fd()]);
        fs::remove_file(dir.path().join("file")).unwrap();
        result
    };
    keep(&mut client, "a", 1).unwrap();
    keep(&mut client, "a", 2).unwrap();
    keep(&mut client, "b", 3).unwrap();
    let text = refused(keep(&mut client, "1", 4));
    assert_eq!(
        text,
        "Parameter 'fdname' expects a name not starting with a digit"
    );
    let mut other = Client::connect(&served.path, None).unwrap();
    let not_found = "File descriptor named 'a' not found";
    assert_eq!(length(&mut other, "a"), not_found);
    assert_eq!(length(&mut client, "a"), "2 bytes");
    assert_eq!(length(&mut client, "a"), not_found, "it was taken");
    client.execute("closefd", json!({"fdname": "b"})).unwrap();
    let gone = refused(client.execute("closefd", json!({"fdname": "b"})));
    assert_eq!(gone, "File descriptor named 'b' not found");
    served.quit(&mut client);
}

#[test]
fn descriptors_that_a_command_did_not_want_are_closed_when_others_come() {
    let served = Served::new(ServerOptions::default());
    let mut client = Client::connect(&served.path, None).unwrap();
    let (_reader, writer) = std::io::pipe().unwrap();
    let file = tempfile::tempfile().unwrap();
    client
        .execute_passing("query-jobs", json!({}), &[writer.as_fd()])
        .unwrap();
    let name = json!({"fdname": "a"});
    client
        .execute_passing("getfd", name, &[file.as_fd()])
        .unwrap();
    assert_eq!(length(&mut client, "a"), "0 bytes");
    drop(writer);
    // The server has closed its copy of the other end.
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut &_reader, &mut rest).unwrap();
    served.quit(&mut client);
}

#[test]
fn files_are_opened_from_sets_by_access() {
    let served = Served::new(ServerOptions::default());
    let mut client = Client::connect(&served.path, None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, [0; 7]).unwrap();
    let reading = File::open(&path).unwrap();
    let writing = OpenOptions::new().write(true).open(&path).unwrap();
    let add = |client: &mut Client, arguments: Value, file: &File| {
        client.execute_passing("add-fd", arguments, &[file.as_fd()])
    };
    let first = add(&mut client, json!({"opaque": "ro"}), &reading).unwrap();
    assert_eq!(first["fdset-id"], 0);
    let second = add(&mut client, json!({"fdset-id": 7}), &writing).unwrap();
    assert_eq!(second["fdset-id"], 7);
    let third = add(&mut client, json!({}), &writing).unwrap();
    assert_eq!(third["fdset-id"], 1);
    let negative = refused(add(&mut client, json!({"fdset-id": -1}), &writing));
    assert_eq!(
        negative,
        "Parameter 'fdset-id' expects a non-negative value"
    );
    drop(client);
    // Sets are everybody's, and outlive the connection.
    let mut client = Client::connect(&served.path, None).unwrap();
    assert_eq!(length(&mut client, "/dev/fdset/0"), "7 bytes");
    assert_eq!(length(&mut client, "/dev/fdset/0"), "7 bytes");
    for (name, error) in [
        (
            "/dev/fdset/7",
            "Failed to find file descriptor with matching flags=0x0",
        ),
        ("/dev/fdset/5", "Failed to find fdset /dev/fdset/5"),
        ("/dev/fdset/x", "Could not parse fdset /dev/fdset/x"),
    ] {
        assert_eq!(length(&mut client, name), error);
    }
    let sets = client.execute("query-fdsets", json!({})).unwrap();
    assert_eq!(
        sets,
        json!([
            {"fdset-id": 0, "fds": [{"fd": first["fd"], "opaque": "ro"}]},
            {"fdset-id": 1, "fds": [{"fd": third["fd"]}]},
            {"fdset-id": 7, "fds": [{"fd": second["fd"]}]},
        ])
    );
    let wrong = json!({"fdset-id": 7, "fd": first["fd"]});
    let text = refused(client.execute("remove-fd", wrong));
    let fd = &first["fd"];
    assert_eq!(
        text,
        format!("File descriptor named 'fdset-id:7, fd:{fd}' not found")
    );
    client.execute("remove-fd", json!({"fdset-id": 0})).unwrap();
    client
        .execute("remove-fd", json!({"fdset-id": 7, "fd": second["fd"]}))
        .unwrap();
    let text = refused(client.execute("remove-fd", json!({"fdset-id": 7})));
    assert_eq!(text, "File descriptor named 'fdset-id:7' not found");
    served.quit(&mut client);
}

#[test]
fn more_descriptors_than_a_message_may_have_end_the_connection() {
    let served = Served::new(ServerOptions::default());
    let mut client = Client::connect(&served.path, None).unwrap();
    let file = tempfile::tempfile().unwrap();
    let many = [file.as_fd(); DESCRIPTORS_MAX + 1];
    let result = client.execute_passing("query-jobs", json!({}), &many);
    assert!(matches!(result, Err(ClientError::Io(_))), "{result:?}");
    client.execute("query-jobs", json!({})).unwrap();
    // One that does not count them.
    let mut raw = served.negotiated();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
    let request = [IoSlice::new(b"{'execute':'query-jobs'}")];
    rustix::net::sendmsg(&raw.stream, &request, &mut control, SendFlags::empty()).unwrap();
    assert_eq!(raw.line(), "");
    served.quit(&mut client);
}

/// Commands on descriptors, each with the file that travels with it or none.
const STEPS: [(&str, &str, Passing); 16] = [
    ("getfd", "{'fdname':'a'}", Passing::Nothing),
    ("getfd", "{'fdname':'1'}", Passing::Nothing),
    ("getfd", "{'fdname':'1'}", Passing::File),
    ("getfd", "{'fdname':'a'}", Passing::File),
    ("getfd", "{'fdname':''}", Passing::File),
    ("closefd", "{'fdname':'a'}", Passing::Nothing),
    ("closefd", "{'fdname':'a'}", Passing::Nothing),
    ("add-fd", "{}", Passing::Nothing),
    ("add-fd", "{'fdset-id':-1}", Passing::File),
    ("add-fd", "{'opaque':'x'}", Passing::File),
    ("add-fd", "{'fdset-id':7}", Passing::File),
    ("add-fd", "{}", Passing::File),
    ("remove-fd", "{'fdset-id':3}", Passing::Nothing),
    ("remove-fd", "{'fdset-id':7,'fd':1}", Passing::Nothing),
    ("remove-fd", "{'fdset-id':7}", Passing::Nothing),
    ("remove-fd", "{'fdset-id':7}", Passing::Nothing),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Passing {
    Nothing,
    File,
}

/// The answers to all steps, without the numbers of descriptors.
fn answers(client: &mut Client) -> Vec<String> {
    let file = tempfile::tempfile().unwrap();
    let steps = STEPS.iter().map(|(command, arguments, passing)| {
        let arguments = parse(arguments).unwrap();
        let passed = match passing {
            Passing::Nothing => &[][..],
            Passing::File => &[file.as_fd()],
        };
        match client.execute_passing(command, arguments, passed) {
            Ok(result) => format!("{:?}", result.get("fdset-id")),
            Err(ClientError::Refused(error)) => error.desc,
            Err(error) => panic!("{error}"),
        }
    });
    steps.collect()
}

#[test]
fn the_words_are_those_of_a_machine_of_qemu() {
    let served = Served::new(ServerOptions::default());
    let mut ours = Client::connect(&served.path, None).unwrap();
    let our_answers = answers(&mut ours);
    ours.execute("quit", json!({})).unwrap();
    served.end();
    let Some(peer) = Peer::machine() else { return };
    let mut theirs = peer.client();
    assert_eq!(our_answers, answers(&mut theirs));
}

//! A server, with clients of all kinds.

use std::io::Read;

use cowslip_qmp::ServerOptions;

use crate::support::Served;

#[test]
fn a_client_is_greeted_negotiates_and_quits() {
    let served = Served::new(ServerOptions::default());
    let mut client = served.connect();
    let greeting = client.line();
    assert!(
        greeting.starts_with(
            "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 2, \"minor\": 0, \"major\": 10}, \
             \"package\": \"Cowslip "
        ),
        "{greeting}"
    );
    let early = "{\"error\": {\"class\": \"CommandNotFound\", \
                 \"desc\": \"Expecting capabilities negotiation with 'qmp_capabilities'\"}}";
    assert_eq!(client.ask("{\"execute\": \"quit\"}"), early);
    let oob = client.ask("{'execute': 'qmp_capabilities', 'arguments': {'enable': ['oob']}}");
    assert!(oob.contains("Capability oob not available"), "{oob}");
    let done = client.ask("{\"execute\": \"qmp_capabilities\", \"id\": [1, null]}");
    assert_eq!(done, "{\"return\": {}, \"id\": [1, null]}");
    let again = client.ask("{\"execute\": \"qmp_capabilities\", \"id\": 1}");
    assert_eq!(
        again,
        "{\"id\": 1, \"error\": {\"class\": \"CommandNotFound\", \
         \"desc\": \"Capabilities negotiation is already complete, command ignored\"}}"
    );
    assert_eq!(client.ask("{'execute':'quit'}"), "{\"return\": {}}");
    assert_eq!(client.line(), "");
    served.end();
}

#[test]
fn arguments_are_checked_before_the_handler_sees_them() {
    let served = Served::new(ServerOptions::default());
    let mut client = served.negotiated();
    for (request, error) in [
        ("{'execute':'job-pause'}", "Parameter 'id' is missing"),
        (
            "{'execute':'job-pause','arguments':{'id':1}}",
            "Invalid parameter type for 'id', expected: string",
        ),
        (
            "{'execute':'job-pause','arguments':{'id':'x','y':1}}",
            "Parameter 'y' is unexpected",
        ),
        (
            "{'execute':'job-pause','arguments':[]}",
            "QMP input member 'arguments' must be an object",
        ),
        ("{'execute':'job-pause'", ""),
        ("}", "Parameter 'id' is missing"),
        ("@", "JSON parse error, stray '@'"),
    ] {
        if error.is_empty() {
            client.send(request);
            continue;
        }
        let expected =
            format!("{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"{error}\"}}}}");
        assert_eq!(client.ask(request), expected, "{request}");
    }
    assert_eq!(
        client.ask("{'execute':'block-job-pause','arguments':{'device':'x'}, 'id': 'y'}"),
        "{\"id\": \"y\", \"error\": {\"class\": \"DeviceNotActive\", \
         \"desc\": \"Block job '\\\"x\\\"' not found\"}}"
    );
    client.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn commands_of_one_client_are_answered_in_order_however_they_are_cut() {
    let served = Served::new(ServerOptions::default());
    let mut client = served.negotiated();
    let mut all = String::new();
    for id in 0..500 {
        all += &format!("{{\"execute\":\"query-jobs\",\"id\":{id}}}");
    }
    // Pieces that are longer than a single receipt, and pieces within a word.
    for piece in all.as_bytes().chunks(5003) {
        let (one, two) = piece.split_at(piece.len() / 3);
        client.send(std::str::from_utf8(one).unwrap());
        client.send(std::str::from_utf8(two).unwrap());
    }
    for id in 0..500 {
        assert_eq!(client.line(), format!("{{\"return\": [], \"id\": {id}}}"));
    }
    client.send("{'execute':'quit'}{'execute':'query-jobs'}");
    assert_eq!(client.line(), "{\"return\": {}}");
    assert_eq!(
        client.line(),
        "",
        "a server that was stopped begins nothing"
    );
    served.end();
}

#[test]
fn clients_are_served_side_by_side_and_all_get_events() {
    let served = Served::new(ServerOptions::default());
    let (mut one, mut two) = (served.negotiated(), served.negotiated());
    let mut silent = served.connect();
    silent.line();
    let reply = one.ask("{'execute':'job-pause','arguments':{'id':'2'}}");
    let event = |line: &str| {
        assert!(
            line.starts_with("{\"timestamp\": {\"seconds\": 1"),
            "{line}"
        );
        let end = ", \"event\": \"JOB_STATUS_CHANGE\", \
                   \"data\": {\"id\": \"2\", \"status\": \"paused\"}}";
        assert!(line.ends_with(end), "{line}");
    };
    event(&reply);
    event(&one.line());
    assert_eq!(
        one.line(),
        "{\"return\": {}}",
        "events come before the reply"
    );
    event(&two.line());
    event(&two.line());
    assert_eq!(two.ask("{'execute':'query-jobs'}"), "{\"return\": []}");
    let refused = silent.ask("{'execute':'query-jobs'}");
    assert!(
        refused.contains("Expecting capabilities"),
        "no event: {refused}"
    );
    drop(one);
    two.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn clients_beyond_the_limit_wait_until_another_has_left() {
    let served = Served::new(ServerOptions {
        clients_max: 1,
        ..ServerOptions::default()
    });
    let first = served.negotiated();
    let mut second = served.connect();
    let waits = Some(std::time::Duration::from_millis(50));
    second.stream.set_read_timeout(waits).unwrap();
    let mut byte = [0];
    let got = second.stream.read(&mut byte);
    assert!(got.is_err(), "it is not greeted: {got:?}");
    drop(first);
    let long = Some(std::time::Duration::from_secs(20));
    second.stream.set_read_timeout(long).unwrap();
    assert!(second.line().starts_with("{\"QMP\""));
    second.ask("{'execute':'qmp_capabilities'}");
    second.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn a_client_that_does_not_read_its_events_is_cut_off_and_no_other() {
    let served = Served::new(ServerOptions {
        events_max: 100,
        ..ServerOptions::default()
    });
    let mut reader = served.negotiated();
    let mut deaf = served.negotiated();
    // More than the buffers of a socket have, in pieces that the limit allows a reader.
    for _ in 0..200 {
        reader.send("{'execute':'job-pause','arguments':{'id':'60'}}");
        for _ in 0..60 {
            assert!(reader.line().starts_with("{\"timestamp\""));
        }
        assert_eq!(reader.line(), "{\"return\": {}}");
    }
    let mut whole = 0;
    while !deaf.line().is_empty() {
        whole += 1;
    }
    assert!(
        (100..12_000).contains(&whole),
        "{whole} events before the end"
    );
    reader.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn a_client_that_does_not_read_its_replies_is_not_read_either() {
    let served = Served::new(ServerOptions::default());
    let mut deaf = served.negotiated();
    deaf.stream.set_nonblocking(true).unwrap();
    let request = "{'execute':'query-qmp-schema'}".repeat(1000);
    let mut sent = 0;
    // Each has an answer of 100 KiB; the server stops reading long before it would keep them all.
    let started = std::time::Instant::now();
    while started.elapsed() < std::time::Duration::from_secs(2) {
        match deaf.try_send_some(&request) {
            Some(bytes) => sent += bytes,
            None => std::thread::sleep(std::time::Duration::from_millis(5)),
        }
    }
    assert!(sent < 1 << 20, "{sent} bytes of requests were taken");
    let mut other = served.negotiated();
    assert_eq!(other.ask("{'execute':'query-jobs'}"), "{\"return\": []}");
    // The server waits for it, but not for ever.
    drop(deaf);
    other.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn events_of_one_object_are_limited_and_the_last_one_comes() {
    let served = Served::new(ServerOptions::default());
    let mut client = served.negotiated();
    let mut ask = |id: &str| {
        let reply = client.ask(&format!(
            "{{'execute':'job-resume','arguments':{{'id':'{id}'}}}}"
        ));
        assert!(reply.contains("\"reason\": \"0\""), "{reply}");
        assert_eq!(client.line(), "{\"return\": {}}");
    };
    ask("disk");
    ask("other");
    for device in ["disk", "other"] {
        let last = client.line();
        assert!(
            last.contains("\"reason\": \"9\"") && last.contains(device),
            "{last}"
        );
    }
    client.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn commands_have_limits() {
    let served = Served::new(ServerOptions::default());
    let mut client = served.negotiated();
    let error = |desc: &str| {
        format!("{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"JSON {desc}\"}}}}")
    };
    let nested = "[".repeat(100_000);
    assert_eq!(client.ask(&nested), error("nesting depth limit exceeded"));
    let long = format!("{{'execute':'{}'}}", "x".repeat(1 << 20));
    assert_eq!(client.ask(&long), error("token size limit exceeded"));
    let many = format!("[{}1]", "1,".repeat(100_000));
    assert_eq!(client.ask(&many), error("token count limit exceeded"));
    // Within them: a chain of a thousand images.
    let mut chain = String::from("'x'");
    for _ in 0..1000 {
        chain = format!("{{'driver':'qcow2','file':'f','backing':{chain}}}");
    }
    let reply = client.ask(&format!("{{'execute':'blockdev-add','arguments':{chain}}}"));
    assert_eq!(reply, "{\"return\": {}}");
    let deepest = format!("{}{}", "[".repeat(1023), "]".repeat(1023));
    let reply = client.ask(&format!("{{'execute':'query-jobs','id':{deepest}}}"));
    assert_eq!(reply.len(), "{\"return\": [], \"id\": }".len() + 2 * 1023);
    client.send("{'execute':'quit'}");
    served.end();
}

#[test]
fn a_stopped_server_waits_for_a_client_that_does_not_read_for_a_limited_time() {
    let served = Served::new(ServerOptions {
        drain_timeout: std::time::Duration::from_millis(100),
        ..ServerOptions::default()
    });
    let mut deaf = served.negotiated();
    deaf.send(&"{'execute':'query-qmp-schema'}".repeat(20));
    let mut other = served.negotiated();
    other.send("{'execute':'quit'}");
    served.end();
    drop(deaf);
}

//! A server, with clients of all kinds.

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

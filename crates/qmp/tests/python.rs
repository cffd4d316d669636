//! QEMU's own client, the Python package `qemu.qmp`, at our server. `COWSLIP_PYTHON` names the
//! interpreter that has it, `python3` otherwise. Skips loudly where there is none.

use std::process::Command;

use cowslip_qmp::ServerOptions;

use crate::support::Served;

/// Negotiates, executes commands that succeed and that fail, waits for events, and quits.
const PROGRAM: &str = r#"
import asyncio, sys
from qemu.qmp import EventListener, ExecuteError, QMPClient

async def main():
    client = QMPClient("cowslip")
    with client.listener("JOB_STATUS_CHANGE") as events:
        await client.connect(sys.argv[1])
        greeting = client.greeting._asdict()
        assert greeting["QMP"]["version"]["package"].startswith("Cowslip "), greeting
        assert await client.execute("query-jobs") == []
        names = [one["name"] for one in await client.execute("query-commands")]
        assert "blockdev-add" in names, names
        schema = await client.execute("query-qmp-schema")
        assert len(schema) > 200, len(schema)
        try:
            await client.execute("block-job-pause", {"device": "x"})
            assert False
        except ExecuteError as error:
            assert error.error_class == "DeviceNotActive", error
        await client.execute("job-pause", {"id": "3"})
        for _ in range(3):
            event = await events.get()
            assert event["data"] == {"id": "3", "status": "paused"}, event
        # Several commands under way, as its own multiplexing sends them.
        await asyncio.gather(*[client.execute("query-jobs") for _ in range(50)])
        await client.execute("quit")
        try:
            await client.disconnect()
        except EOFError:
            pass

asyncio.run(main())
"#;

#[test]
fn qemus_python_client_is_served() {
    let python = std::env::var("COWSLIP_PYTHON").unwrap_or("python3".to_string());
    let found = Command::new(&python)
        .args(["-c", "import qemu.qmp"])
        .output();
    if !found.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: the Python package qemu.qmp is not installed");
        return;
    }
    let served = Served::new(ServerOptions::default());
    let output = Command::new(&python)
        .args(["-c", PROGRAM])
        .arg(&served.path)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    served.end();
}

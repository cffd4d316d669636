//! Events as lines: for people the time, the name and the data as words; for programs JSON.

use cowslip_console::output;
use cowslip_console::time::local_date_and_time;
use cowslip_qmp::Client;
use cowslip_qmp::client::{ClientError, Received};
use serde_json::{Value, json};

use super::tables::printable;

/// Prints events until the connection ends; those of these names, or all.
///
/// # Errors
/// The connection has ended, or failed.
pub fn follow(client: &mut Client, names: &[String], as_json: bool) -> Result<(), ClientError> {
    loop {
        if let Some(event) = client.next_event(None)?
            && (names.is_empty() || names.contains(&event.name))
        {
            print(&event, as_json);
        }
    }
}

/// Prints an event.
pub fn print(event: &Received, as_json: bool) {
    let line = match as_json {
        true => json_line(event),
        false => line(event),
    };
    output::print(&format!("{line}\n"));
    output::flush();
}

fn json_line(event: &Received) -> String {
    let mut value = json!({
        "timestamp": {
            "seconds": event.time.as_secs(),
            "microseconds": event.time.subsec_micros(),
        },
        "event": event.name,
    });
    if !event.data.is_empty() {
        value["data"] = event.data.clone().into();
    }
    value.to_string()
}

fn line(event: &Received) -> String {
    let time = local_date_and_time(event.time.as_secs());
    let mut line = format!("{time}.{:03} {}", event.time.subsec_millis(), event.name);
    for (name, value) in &event.data {
        let value = match value {
            // A word needs no quotes.
            Value::String(text) if !text.is_empty() && !text.contains([' ', '"']) => {
                printable(text)
            }
            other => other.to_string(),
        };
        line.push_str(&format!(" {name}={value}"));
    }
    line
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_event_is_one_line() {
        let Value::Object(data) = json!({"id": "j", "error": "no space\nleft", "len": 5}) else {
            unreachable!()
        };
        let event = Received {
            name: "BLOCK_JOB_COMPLETED".to_string(),
            data,
            time: Duration::from_millis(951_782_400_250),
        };
        assert_eq!(
            line(&event),
            "2000-02-29 00:00:00.250 BLOCK_JOB_COMPLETED id=j error=\"no space\\nleft\" len=5"
        );
        let value: Value = serde_json::from_str(&json_line(&event)).unwrap();
        assert_eq!(value["data"]["len"], 5);
        assert_eq!(value["timestamp"]["microseconds"], 250_000);
    }
}

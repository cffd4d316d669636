//! A headless browser, controlled by its debugging protocol. Its messages go through two named
//! pipes, each ended by a zero byte (`--remote-debugging-pipe`): no port, no library.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::support::running::Running;
use serde_json::{Value, json};

/// Chromium's engine without a desktop.
pub const PROGRAM: &str = "chromium-headless-shell";
/// A browser that does not answer for so long has died.
const ANSWERS_WITHIN: Duration = Duration::from_secs(120);

/// How a page is shown.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// `screen` or `print`.
    pub media: &'static str,
    /// `light` or `dark`.
    pub scheme: &'static str,
    /// Width of the window.
    pub width: u32,
}

/// A running browser with one page.
pub struct Browser {
    child: Running,
    to: File,
    from: Receiver<Value>,
    session: String,
    number: u64,
    /// Events that it has reported.
    pub events: Vec<Value>,
    _directory: crate::support::Scratch,
}

impl Browser {
    /// Starts it.
    pub fn start() -> Browser {
        let directory = crate::support::scratch();
        let pipe = |name: &str| {
            let path = directory.path().join(name);
            crate::support::run(Command::new("mkfifo").arg(&path));
            path
        };
        let (to, from) = (pipe("to"), pipe("from"));
        // The shell gives it the pipes as the numbers that it expects.
        let script = format!(
            "exec {PROGRAM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
             --no-first-run --user-data-dir=\"$1\" --remote-debugging-pipe about:blank 3<\"$2\" 4>\"$3\""
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]);
        shell.args([&directory.path().join("profile"), &to, &from]);
        shell.stdin(Stdio::null()).stdout(Stdio::null());
        let child = Running::start(shell.stderr(Stdio::null()));
        let to = File::options().write(true).open(to).unwrap();
        let from = BufReader::new(File::open(from).unwrap());
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for message in from.split(0) {
                let Ok(message) = message else { return };
                let message = serde_json::from_slice(&message).unwrap();
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Browser {
            child,
            to,
            from: receiver,
            session: String::new(),
            number: 0,
            events: Vec::new(),
            _directory: directory,
        };
        let target = browser.ask("Target.createTarget", json!({ "url": "about:blank" }));
        let attached = browser.ask(
            "Target.attachToTarget",
            json!({ "targetId": target["targetId"], "flatten": true }),
        );
        browser.session = attached["sessionId"].as_str().unwrap().to_string();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    fn next(&mut self) -> Value {
        let message = self.from.recv_timeout(ANSWERS_WITHIN);
        message.expect("the browser answers")
    }

    /// Asks for something and waits for the answer.
    pub fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.number += 1;
        let mut message = json!({ "id": self.number, "method": method, "params": parameters });
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.to
            .write_all(format!("{message}\0").as_bytes())
            .unwrap();
        loop {
            let answer = self.next();
            if answer["id"] == self.number {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// Opens a file and waits until it is there.
    pub fn open(&mut self, file: &Path) {
        let url = format!("file://{}", file.display());
        self.ask("Page.navigate", json!({ "url": url }));
        let is_loaded = |event: &Value| event["method"] == "Page.loadEventFired";
        // Events before the answer are here already.
        while !self.events.iter().any(is_loaded) {
            let event = self.next();
            self.events.push(event);
        }
        self.events.retain(|event| !is_loaded(event));
    }

    /// From now on the page is shown so.
    pub fn look(&mut self, look: Look) {
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            json!({ "width": look.width, "height": 900, "deviceScaleFactor": 1, "mobile": false }),
        );
        self.ask(
            "Emulation.setEmulatedMedia",
            json!({
                "media": look.media,
                "features": [{ "name": "prefers-color-scheme", "value": look.scheme }],
            }),
        );
    }

    /// The value of an expression.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "returnByValue": true });
        let answer = self.ask("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{answer}");
        answer["result"]["value"].clone()
    }

    /// The whole page as PNG, in base64.
    pub fn screenshot(&mut self) -> String {
        let asked = json!({ "format": "png", "captureBeyondViewport": true });
        let answer = self.ask("Page.captureScreenshot", asked);
        answer["data"].as_str().unwrap().to_string()
    }

    /// The page on paper as PDF, in base64.
    pub fn pdf(&mut self) -> String {
        let asked = json!({ "preferCSSPageSize": true, "printBackground": false });
        let answer = self.ask("Page.printToPDF", asked);
        answer["data"].as_str().unwrap().to_string()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have died already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

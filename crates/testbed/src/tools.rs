//! Runs programs that describe the machine, within bounds: a few seconds and a few kilobytes.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// No program here has a reason to take so long.
const WITHIN: Duration = Duration::from_secs(10);
const BYTES_MAX: u64 = 16 << 10;
/// Where programs for administrators are, which users do not have in their path.
const MORE_DIRECTORIES: [&str; 2] = ["/usr/sbin", "/sbin"];

/// Returns the output of a program, in English: its standard output, or its standard error if that
/// is empty. `None` if it is not installed, fails, or does not end.
pub fn output_of(program: &str, words: &[&str]) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<_> = std::env::split_paths(&path).collect();
    directories.extend(MORE_DIRECTORIES.map(Into::into));
    let mut found = directories.iter().map(|directory| directory.join(program));
    run(&found.find(|path| path.is_file())?, words)
}

fn run(program: &Path, words: &[&str]) -> Option<String> {
    let mut child = Command::new(program)
        .args(words)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    let stdout = child.stdout.take()?;
    let stderr = child.stderr.take()?;
    // Both are read meanwhile: a full pipe would hold the program up.
    let streams = [reader(stdout), reader(stderr)];
    let ended = ended_well(&mut child);
    let [stdout, stderr] = streams.map(|stream| stream.join().unwrap_or_default());
    let text = if stdout.trim().is_empty() {
        stderr
    } else {
        stdout
    };
    ended.then(|| text.trim_end().to_string())
}

fn reader(stream: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let mut stream = stream;
        // Output that cannot be read is left out.
        drop(stream.by_ref().take(BYTES_MAX).read_to_end(&mut bytes));
        drop(std::io::copy(&mut stream, &mut std::io::sink()));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn ended_well(child: &mut Child) -> bool {
    let begun = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if begun.elapsed() < WITHIN => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                // It may have ended just now.
                drop(child.kill());
                drop(child.wait());
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_either_stream_is_returned() {
        assert_eq!(
            output_of("sh", &["-c", "echo out; echo err >&2"]),
            Some("out".to_string())
        );
        assert_eq!(
            output_of("sh", &["-c", "echo err >&2"]),
            Some("err".to_string())
        );
        assert_eq!(output_of("sh", &["-c", "echo out; exit 1"]), None);
        assert_eq!(output_of("no-such-program", &[]), None);
    }

    #[test]
    fn what_they_say_is_bounded() {
        let said = output_of("sh", &["-c", "head -c 1000000 /dev/zero | tr '\\0' x"]).unwrap();
        assert_eq!(said.len() as u64, BYTES_MAX);
    }
}

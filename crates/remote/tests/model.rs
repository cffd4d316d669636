//! Random reads with faults against a model of the bytes: what is read is right, or an error.

use cowslip_block::random::Random;
use cowslip_testbed::web::{WebFault, WebObject, WebServer};

use crate::support::{block_on, open, pattern, read_async};

/// Operations in the gate; `COWSLIP_REMOTE_OPERATIONS` sets another number.
const OPERATIONS: u64 = 600;

/// Operations between two reports.
const REPORTED: u64 = 10_000;

fn fault(random: &mut Random) -> WebFault {
    match random.below(40) {
        0 => WebFault::Status(500, String::new()),
        1 => WebFault::Status(429, "slow down".to_string()),
        2 => WebFault::Reset,
        3 | 4 => WebFault::CutAfter(random.below(300_000) as usize),
        5 => WebFault::Shifted(512 * (1 + random.below(8))),
        6 => WebFault::LongBody(1 + random.below(5000) as usize),
        7 => WebFault::Bare,
        8 => WebFault::Status(403, "<Code>ExpiredToken</Code>".to_string()),
        _ => WebFault::Nothing,
    }
}

/// Short lengths and long ones, each kind as often.
fn len_of(random: &mut Random) -> usize {
    let bits = random.below(19);
    1 + random.below(1 << bits) as usize
}

#[test]
fn random_reads_with_faults_give_the_bytes_of_the_object() {
    let operations = std::env::var("COWSLIP_REMOTE_OPERATIONS");
    let operations = operations.map_or(OPERATIONS, |text| text.parse().unwrap());
    let seed = std::env::var("COWSLIP_SEED").map_or(0x5eed_0028, |text| text.parse().unwrap());
    println!("COWSLIP_SEED={seed} COWSLIP_REMOTE_OPERATIONS={operations}");
    let mut random = Random(seed);
    let server = WebServer::start().unwrap();
    let bytes = pattern(3_000_000 + random.below(100_000) as usize, seed);
    server.put("/a", WebObject::tagged(bytes.clone(), "one"));
    let mut of_faults = Random(seed ^ 0xfa17);
    server.judge(move |_| fault(&mut of_faults));
    let cache = tempfile::tempdir().unwrap();
    let shown = cache.path().display();
    let kinds = [
        "readahead=256k,memory=512k,block-size=16k".to_string(),
        format!("cache-dir={shown},block-size=16k"),
        format!("cache-dir={shown},cache-limit=2M,readahead=0"),
    ];
    let mut done = 0;
    while done < operations {
        let kind = &kinds[random.below(3) as usize];
        let file = loop {
            match open(&server, &format!("{kind},wait-timeout=60")) {
                Ok(file) => break file,
                // Refused credentials are an error at once when a file is opened.
                Err(error) => assert!(error.to_string().contains("403"), "{error}"),
            }
        };
        let count = (1 + random.below(60)).min(operations - done);
        if done / REPORTED != (done + count) / REPORTED {
            println!("{done} operations");
            // The record of the server grows with each request.
            server.forget();
        }
        done += count;
        let ranges = (0..count).map(|_| {
            let offset = random.below(bytes.len() as u64 + 1000);
            (offset, len_of(&mut random))
        });
        let ranges: Vec<(u64, usize)> = ranges.collect();
        block_on(async {
            for together in ranges.chunks(8) {
                let reads = together
                    .iter()
                    .map(|(offset, len)| read_async(&file, *offset, *len));
                let found = futures_util::future::join_all(reads).await;
                for ((offset, len), found) in together.iter().zip(found) {
                    let start = (*offset as usize).min(bytes.len());
                    let end = (start + len).min(bytes.len());
                    let mut expected = bytes[start..end].to_vec();
                    expected.resize(*len, 0);
                    assert!(
                        found.unwrap() == expected,
                        "{len} bytes at {offset} of {kind}"
                    );
                }
            }
        });
    }
}

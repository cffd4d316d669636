//! Workloads: by name, from traces, from statistics.

use cowslip_trace::{Kind, Request};

use super::*;

fn request(kind: Kind, offset: u64, len: u64) -> Request {
    Request::new(kind, offset, len)
}

#[test]
fn a_name_is_a_workload_or_none() {
    assert_eq!(Workload::names().count(), 8);
    for name in Workload::names() {
        let workload = Workload::named(name).unwrap();
        assert!(workload.total() > 1.0, "{name}");
    }
    assert_eq!(Workload::named("quick"), None);
}

#[test]
fn a_trace_says_what_was_in_order_and_how_much_was_touched() {
    let mut requests = Vec::new();
    for at in 0..1000 {
        // Two streams that take turns, and writes that are a mebibyte apart.
        requests.push(request(Kind::Read, at * 65_536, 65_536));
        requests.push(request(Kind::Read, (1 << 40) + at * 65_536, 65_536));
        requests.push(request(Kind::Write, at << 20, 4096));
        requests.push(request(Kind::Flush, 0, 0));
    }
    requests.push(request(Kind::Discard, 0, 1 << 60));
    requests.push(request(Kind::Write, 5, 0));
    let workload = Workload::of_trace("t", requests);
    assert_eq!(workload.reads.count, 2000);
    assert!(workload.reads.in_order > 0.99);
    assert_eq!(workload.writes.count, 1001);
    assert!(workload.writes.in_order < 0.01);
    assert_eq!((workload.flushes, workload.discards.count), (1000, 1));
    let distinct = workload.distinct.as_ref().unwrap();
    assert_eq!(distinct.units(4096), 1000);
    assert_eq!(distinct.units(65_536), 1000);
    assert_eq!(distinct.units(2 << 20), 500);
    assert!((workload.unit_share(2 << 20) - 0.5).abs() < 0.01);
    // Reads of 64 KiB reach 63 mebibytes twice; writes 1000.
    assert_eq!(workload.span_bytes, Some((1000 + 63) << 20));
}

#[test]
fn writes_to_one_place_are_first_once() {
    let same = (0..5000).map(|at| request(Kind::Write, (at % 16) * 4096, 4096));
    let workload = Workload::of_trace("t", same);
    assert!(workload.unit_share(65_536) < 0.001);
    let mut facts = overlay("ext4");
    facts.space.data_bytes = 0;
    let advice = advise(&facts, &workload);
    // One copy in five thousand writes is no reason for another image.
    left(&advice, "clusters");
}

#[test]
fn a_trace_of_any_size_takes_bounded_memory() {
    let endless = (0..40).map(|at| request(Kind::Write, at << 50, (1 << 50) - 1));
    let workload = Workload::of_trace("t", endless);
    assert!(workload.unknown > 0);
    assert!(workload.distinct.unwrap().units(4096) <= 1 << 21);
    let last = request(Kind::Write, i64::MAX as u64 - 10, 10);
    let workload = Workload::of_trace("t", [last, last]);
    assert_eq!(workload.writes.count, 2);
    let empty = Workload::of_trace("t", []);
    assert_eq!((empty.total(), empty.distinct), (1.0, None));
}

const METRICS: &str = "\
# HELP cowslip_node_requests_total Requests that have ended well.
# TYPE cowslip_node_requests_total counter
cowslip_export_requests_total{export=\"e\",kind=\"read\"} 999
cowslip_node_requests_total{node=\"a\",kind=\"read\"} 700
cowslip_node_requests_total{node=\"a\",kind=\"write\"} 300
cowslip_node_requests_total{node=\"a\",kind=\"flush\"} 9
cowslip_node_bytes_total{node=\"a\",kind=\"read\"} 2867200
cowslip_node_bytes_total{node=\"a\",kind=\"write\"} 1228800
cowslip_node_request_duration_seconds_sum{node=\"a\",kind=\"read\"} 0.25
cowslip_node_cache_hits_total{node=\"a\"} 200
cowslip_node_cache_misses_total{node=\"a\"} 800
cowslip_node_written_clusters_total{node=\"a\",space=\"new\"} 60
cowslip_node_written_clusters_total{node=\"a\",space=\"filled\"} 15
cowslip_node_written_clusters_total{node=\"a\",space=\"in-place\"} 225
";

#[test]
fn metrics_of_a_daemon_are_a_workload() {
    let workload = Statistics::parse(METRICS).unwrap().workload(None).unwrap();
    assert_eq!((workload.reads.count, workload.writes.count), (700, 300));
    assert_eq!(workload.reads.mean_bytes(), 4096.0);
    assert_eq!(workload.flushes, 9);
    assert_eq!(workload.first, Some(0.25));
    assert_eq!(workload.cache, Some((200, 800)));
    // Misses that were counted weigh more than those that a model expects.
    let advice = advise(&facts("ext4"), &workload);
    changed(&advice, "cache");
}

#[test]
fn of_several_nodes_one_must_be_chosen() {
    let more = "cowslip_node_requests_total{node=\"b\\\"c\",kind=\"read\"} 1\n";
    let statistics = Statistics::parse(&format!("{METRICS}{more}")).unwrap();
    let names = vec!["a".to_string(), "b\"c".to_string()];
    let error = statistics.workload(None).unwrap_err();
    assert_eq!(error, StatisticsError::WhichNode(names));
    assert!(statistics.workload(Some("x")).is_err());
    let workload = statistics.workload(Some("b\"c")).unwrap();
    assert_eq!(workload.reads.count, 1);
    assert_eq!(workload.cache, None);
}

#[test]
fn statistics_of_blocks_and_of_a_server_are_workloads() {
    let blocks = r#"{"return": [{"node-name": "a", "stats": {"rd_operations": 5, "rd_bytes": 20480,
        "wr_operations": 2, "wr_bytes": 8192, "unmap_operations": 1, "unmap_bytes": 65536,
        "flush_operations": 3}}]}"#;
    let workload = Statistics::parse(blocks).unwrap().workload(None).unwrap();
    assert_eq!((workload.reads.count, workload.writes.count), (5, 2));
    assert_eq!((workload.discards.bytes, workload.flushes), (65_536, 3));
    let server = r#"{"cache":{"budget-bytes":33554432,"used-bytes":100,"hits":90,"misses":10}}"#;
    let workload = Statistics::parse(server).unwrap().workload(None).unwrap();
    assert_eq!(workload.cache, Some((90, 10)));
    // A log, as the server prints it, or the system's journal.
    let earlier = server.replace("90", "5");
    let log = format!("cowslip: {earlier}\nNov 27 03:00 h cowslip[12]: cowslip: {server}\nend\n");
    let workload = Statistics::parse(&log).unwrap().workload(None).unwrap();
    assert_eq!(workload.cache, Some((90, 10)));
}

#[test]
fn what_is_no_statistics_is_refused() {
    let texts = [
        "",
        "{",
        "[]",
        "{}",
        "hello",
        "[{\"stats\": 5}]",
        "{\"cache\": {\"hits\": -1}}",
        "cowslip_node_requests_total 5",
        "cowslip_node_requests_total{node=\"a\"",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    ];
    for text in texts {
        let parsed = Statistics::parse(text).and_then(|it| it.workload(None));
        match parsed {
            Err(StatisticsError::NotStatistics) => {}
            Ok(workload) => assert_eq!(workload.total(), 1.0, "{text}"),
            Err(error) => panic!("{text}: {error}"),
        }
    }
    let hostile = "cowslip_node_requests_total{node=\"a\\";
    assert!(Statistics::parse(hostile).is_err());
}

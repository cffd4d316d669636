//! The table of requests in flight, as messages make and pass it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cowslip_block::Disk;
use cowslip_block::disk::MemoryDisk;
use cowslip_front::{
    DATA_AT, EVENT_IDX, FLUSH, Front, MEMORY_BYTES, Make, PACKED, VERSION_1, memory_file,
};
use cowslip_vhost_user::Options;

use crate::running::Running;

fn server(disk: &Arc<dyn Disk>) -> Running {
    Running::start(Arc::clone(disk), Options::default())
}

/// A server, and a front end of it with this memory.
fn connected(disk: &Arc<dyn Disk>, memory: &OwnedFd, features: u64) -> (Running, Front) {
    let server = server(disk);
    let memory = memory.try_clone().unwrap();
    let front = Front::connect_with(&server.path, features, memory).unwrap();
    (server, front)
}

#[test]
fn a_table_goes_from_one_server_to_the_next() {
    for features in [VERSION_1, VERSION_1 | PACKED] {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1 << 20));
        let memory = memory_file(MEMORY_BYTES).unwrap();
        let (first, mut front) = connected(&disk, &memory, features);
        let (table, description) = front.get_inflight(2, 16).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        for sector in 0..40 {
            front.memory.write(DATA_AT, &[sector as u8; 512]);
            assert_eq!(queue.request(1, sector, &[(DATA_AT, 512)]).unwrap(), 0);
        }
        drop((front, first));
        let (_second, mut front) = connected(&disk, &memory, features);
        front.set_inflight(&table, &description).unwrap();
        // Made available while no server was there.
        let make = Make::plain(0, 39, &[(DATA_AT + 512, 512)]);
        queue.submit(&make).unwrap();
        front.start_queue(&mut queue, 0).unwrap();
        assert_eq!(queue.complete().unwrap().1, 0);
        let mut read = [0; 512];
        front.memory.read(DATA_AT + 512, &mut read);
        assert_eq!(read, [39; 512]);
    }
}

#[test]
fn a_completion_that_nobody_was_notified_of_is_notified_by_the_next_server() {
    for features in [VERSION_1, VERSION_1 | EVENT_IDX, VERSION_1 | PACKED] {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1 << 20));
        let memory = memory_file(MEMORY_BYTES).unwrap();
        let (first, mut front) = connected(&disk, &memory, features);
        let (table, description) = front.get_inflight(2, 16).unwrap();
        let mut queue = front.queue(0, 16).unwrap();
        // The set-up has notifications of its own.
        while queue.is_notified(Duration::from_secs(0)).unwrap() {}
        let make = Make::plain(1, 0, &[(DATA_AT, 512)]);
        queue.submit(&make).unwrap();
        queue.kick().unwrap();
        // As if the server had been killed just before: the driver never learns of this one.
        assert!(queue.is_notified(Duration::from_secs(20)).unwrap());
        drop((front, first));
        let (_second, mut front) = connected(&disk, &memory, features);
        front.set_inflight(&table, &description).unwrap();
        front.start_queue(&mut queue, 0).unwrap();
        assert!(
            queue.is_notified(Duration::from_secs(5)).unwrap(),
            "the driver waits for ever"
        );
        assert_eq!(queue.complete().unwrap().1, 0);
    }
}

#[test]
fn a_guest_that_has_chosen_write_through_keeps_it_with_the_next_server() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1 << 20));
    let memory = memory_file(MEMORY_BYTES).unwrap();
    let wce = 1 << 11;
    let features = VERSION_1 | FLUSH | wce;
    let (first, mut front) = connected(&disk, &memory, features);
    let (early, early_description) = front.get_inflight(1, 16).unwrap();
    let payload = |value: u8| {
        let mut payload: Vec<u8> = [32u32, 1, 0].iter().flat_map(|f| f.to_le_bytes()).collect();
        payload.push(value);
        payload
    };
    assert_eq!(front.send_acked(25, &payload(0), &[]).unwrap(), 0);
    let (late, late_description) = front.get_inflight(1, 16).unwrap();
    assert_eq!(front.config(60).unwrap()[32], 0);
    drop((front, first));
    for (table, description) in [(&early, &early_description), (&late, &late_description)] {
        let (second, mut front) = connected(&disk, &memory, features);
        assert_eq!(front.config(60).unwrap()[32], 1);
        front.set_inflight(table, description).unwrap();
        assert_eq!(front.config(60).unwrap()[32], 0);
        // The driver changes its mind.
        assert_eq!(front.send_acked(25, &payload(1), &[]).unwrap(), 0);
        drop((front, second));
        let (_third, mut front) = connected(&disk, &memory, features);
        front.set_inflight(table, description).unwrap();
        assert_eq!(front.config(60).unwrap()[32], 1);
    }
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("disk", 1 << 20));
    let server = server(&disk);
    let mut front = Front::connect(&server.path, VERSION_1).unwrap();
    let (table, description) = front.get_inflight(2, 16).unwrap();
    let with = |at: usize, byte: u8| {
        let mut changed = description.clone();
        changed[at] = byte;
        changed
    };
    use std::os::fd::AsFd;
    // Too long for the file, misaligned, more queues or descriptors than there is room for.
    for changed in [with(10, 1), with(8, 8), with(16, 200), with(18, 255)] {
        assert_eq!(front.send_acked(32, &changed, &[table.as_fd()]).unwrap(), 1);
    }
    // A file that has room for them is no reason to look at all of them.
    let long = memory_file(1 << 36).unwrap();
    let queues = [65535, 32768].map(u16::to_le_bytes).concat();
    let many = [&(1u64 << 36).to_le_bytes()[..], &[0; 8], &queues, &[0; 4]].concat();
    assert_eq!(front.send_acked(32, &many, &[long.as_fd()]).unwrap(), 1);
    // One for smaller rings than the one that is started.
    front.set_inflight(&table, &description).unwrap();
    let payload = [0u32.to_le_bytes(), 32u32.to_le_bytes()].concat();
    assert_eq!(front.send_acked(8, &payload, &[]).unwrap(), 0);
    assert_eq!(
        front
            .send_acked(12, &0u64.to_le_bytes(), &[table.as_fd()])
            .unwrap(),
        1
    );
}

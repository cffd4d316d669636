//! Fuzz target: a hostile guest, and a table of requests in flight with any content. A ring's
//! parts, chains, indirect tables and headers are written as they are drawn, well-formed requests
//! among them, while the ring is started, stopped and taken over by another server. The server must
//! answer every message, say where the ring is broken if it is, and serve the other queue.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cowslip_front::ring::{DEVICE_AT, DRIVER_AT, DriverRing, NEXT, RING_BYTES, WRITE};
use cowslip_queue::{Event, SharedMemory};
use cowslip_vhost_user::ServerEvent;

use crate::draw::Draw;
use crate::front::{DISK_BYTES, Front, SERIAL, Served, in_time};
use crate::pipe;

/// Memory of the hostile guest: two regions side by side. Its ring is at the start.
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
const FIRST_BYTES: u64 = 0x2_0000;
const SECOND_BYTES: u64 = 0x1_0000;
const MEMORY_BYTES: u64 = FIRST_BYTES + SECOND_BYTES;
/// Where headers, tables and data begin.
const DATA_AT: u64 = 0x1_0000;
/// Memory of the other queue, which no hostile chain names.
const OTHER_GUEST: u64 = 0x5A5A_0000_0000;
const OTHER_USER: u64 = 0x7100_0000_0000;
const OTHER_BYTES: u64 = 2 * RING_BYTES as u64;
const OTHER_SIZE: u16 = 8;

const PACKED: u64 = 1 << 34;
const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;
const IN_ORDER: u64 = 1 << 35;
/// Features without which nothing is negotiated: VERSION_1, protocol features, FLUSH.
const ALWAYS: u64 = 1 << 32 | 1 << 30 | 1 << 9;

const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Kinds of requests, two that there are not among them.
const KINDS: [u32; 9] = [0, 1, 1, 4, 8, 11, 13, 14, 99];
const STEPS_MAX: usize = 64;

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    let queue = pipe::queue();
    queue.block_on(async {
        let mut guest = Guest::new(Served::new(), &mut draw).await;
        let mut steps = 0;
        while !draw.is_empty() && steps < STEPS_MAX {
            guest.step(&mut draw).await;
            steps += 1;
        }
        guest.end().await;
    });
}

/// A ring as it is described to the server.
struct Ring {
    size: u16,
    /// Front end address of its parts.
    parts: [u64; 3],
    base: u32,
    is_started: bool,
    kick: Event,
}

/// A guest with a hostile ring and another one.
pub(crate) struct Guest {
    served: Served,
    front: Option<Front>,
    features: u64,
    memory: Arc<SharedMemory>,
    file: OwnedFd,
    hostile: Ring,
    /// Where the next well-formed chain is made available: of a split ring the index, of a packed
    /// one the descriptor and its wrap counter.
    next: (u16, bool),
    table: Option<Table>,
    is_table_damaged: bool,
    has_second_region: bool,
    other: Other,
}

/// The table of requests in flight.
struct Table {
    file: OwnedFd,
    description: Vec<u8>,
    memory: Arc<SharedMemory>,
    /// Bytes of the hostile queue's part.
    part_bytes: u64,
}

/// The queue that must go on.
struct Other {
    memory: Arc<SharedMemory>,
    file: OwnedFd,
    driver: DriverRing,
    ring: Ring,
    /// Base of rings that have not begun.
    first_base: u32,
}

fn memory(len: u64) -> (OwnedFd, Arc<SharedMemory>) {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    let memory = SharedMemory::map(file.as_fd(), 0, len).unwrap();
    (file, memory)
}

fn payload(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    (u64::from(second) << 32 | u64::from(first)).to_le_bytes()
}

impl Guest {
    /// A front end with two rings at work.
    pub(crate) async fn new(served: Served, draw: &mut Draw<'_>) -> Guest {
        let shape = draw.byte();
        let mut features = ALWAYS;
        for (bit, feature) in [(1, PACKED), (2, EVENT_IDX), (4, INDIRECT), (8, IN_ORDER)] {
            features |= if shape & bit != 0 { feature } else { 0 };
        }
        let (file, memory_of_guest) = memory(MEMORY_BYTES);
        let (other_file, other_memory) = memory(OTHER_BYTES);
        let kinds = (features & PACKED != 0, features & EVENT_IDX != 0);
        let ring = |size: u16, user: u64| Ring {
            size,
            parts: [0, DRIVER_AT as u64, DEVICE_AT as u64].map(|at| user + at),
            base: if kinds.0 { 0x8000_8000 } else { 0 },
            is_started: false,
            kick: Event::new().unwrap(),
        };
        let mut guest = Guest {
            served,
            front: None,
            features,
            memory: memory_of_guest,
            file,
            hostile: ring(draw.pick(&[8, 16, 4, 64, 32, 256, 5, 1]), USER),
            next: (0, true),
            table: None,
            is_table_damaged: false,
            has_second_region: true,
            other: Other {
                driver: DriverRing::new(&other_memory, (0, OTHER_SIZE), kinds),
                memory: other_memory,
                file: other_file,
                ring: ring(OTHER_SIZE, OTHER_USER),
                first_base: if kinds.0 { 0x8000_8000 } else { 0 },
            },
        };
        guest.connect().await;
        if shape & 16 != 0 {
            guest.make_table(draw).await;
        }
        guest.start_other().await;
        guest.start_hostile().await;
        guest
    }

    fn front(&self) -> &Front {
        self.front.as_ref().expect("a connection")
    }

    fn is_packed(&self) -> bool {
        self.features & PACKED != 0
    }

    /// Connects to a server, and passes the memory.
    async fn connect(&mut self) {
        self.front = Some(self.served.connect());
        let (offered, _) = self.front().ask(1, &[]).await;
        self.features &= u64::from_le_bytes(offered.try_into().unwrap());
        self.front().inform(3, &[]).await;
        let (protocol, _) = self.front().ask(15, &[]).await;
        self.front().inform(16, &protocol).await;
        assert!(
            self.front()
                .tell(2, &self.features.to_le_bytes(), &[])
                .await
        );
        assert!(self.tell_region(37, 0).await);
        assert!(self.tell_region(37, 1).await);
        self.has_second_region = true;
        let other = payload(&[0, OTHER_GUEST, OTHER_BYTES, OTHER_USER, 0]);
        let file = self.other.file.as_fd();
        assert!(self.front().tell(37, &other, &[file]).await);
    }

    /// Adds or removes a region of the hostile guest.
    async fn tell_region(&self, code: u32, index: usize) -> bool {
        let at = [0, FIRST_BYTES][index];
        let len = [FIRST_BYTES, SECOND_BYTES][index];
        let region = payload(&[0, GUEST + at, len, USER + at, at]);
        let descriptors = [self.file.as_fd()];
        let count = usize::from(code == 37);
        self.front()
            .tell(code, &region, &descriptors[..count])
            .await
    }

    async fn make_table(&mut self, draw: &mut Draw<'_>) {
        let size = draw.pick(&[self.hostile.size, 16, 256]).max(OTHER_SIZE);
        let shape = u64::from(size) << 16 | 2;
        let asked = payload(&[0, 0, shape]);
        let (description, file) = self.front().ask(31, &asked).await;
        let file = file.expect("a table");
        let len = u64::from_le_bytes(description[..8].try_into().unwrap());
        self.table = Some(Table {
            memory: SharedMemory::map(file.as_fd(), 0, len).unwrap(),
            file,
            description,
            part_bytes: len / 2,
        });
    }

    /// Describes a ring to the server, and starts it. Returns whether it could be started.
    async fn start(&self, index: u32, ring: &Ring) -> bool {
        let front = self.front();
        if !front.tell(8, &pair(index, u32::from(ring.size)), &[]).await
            || !front.tell(10, &pair(index, ring.base), &[]).await
        {
            return false;
        }
        let [descriptors, driver, device] = ring.parts;
        let addresses = payload(&[u64::from(index), descriptors, device, driver, 0]);
        let kick = [ring.kick.as_fd()];
        let index = u64::from(index);
        front.tell(9, &addresses, &[]).await
            && front.tell(12, &index.to_le_bytes(), &kick).await
            && front.tell(18, &payload(&[1 << 32 | index]), &[]).await
    }

    async fn stop(&self, index: u32) -> u32 {
        let (reply, _) = self.front().ask(11, &pair(index, 0)).await;
        u32::from_le_bytes(reply[4..].try_into().unwrap())
    }

    async fn start_hostile(&mut self) {
        self.hostile.is_started = self.start(0, &self.hostile).await;
        let base = self.hostile.base;
        self.next = match self.is_packed() {
            true => (base as u16 & 0x7FFF, base & 0x8000 != 0),
            false => (self.memory.load_u16(DRIVER_AT + 2), true),
        };
    }

    async fn start_other(&mut self) {
        assert!(self.start(1, &self.other.ring).await, "it is a sound ring");
    }

    /// A guest address: of one of the regions, at their ends, or of neither; never of the other
    /// queue's memory.
    fn address(draw: &mut Draw<'_>) -> u64 {
        match draw.below(8) {
            0 => match draw.number() {
                number if (OTHER_GUEST..OTHER_GUEST + OTHER_BYTES).contains(&number) => 0,
                number => number,
            },
            1 => GUEST + FIRST_BYTES - draw.below(64),
            2 => GUEST + MEMORY_BYTES - draw.below(64),
            3 => GUEST + draw.below(DATA_AT),
            _ => GUEST + DATA_AT + draw.below(0x100) * 16,
        }
    }

    fn descriptor(&self, draw: &mut Draw<'_>) -> [u8; 16] {
        let address = Guest::address(draw);
        let len = draw.pick(&[16, 1, 512, 48, 4096, 0, 17, 0x1_0000, 0x2_0000, u32::MAX]);
        let flags = draw.byte();
        let ring_flags = match draw.below(4) {
            0 => AVAILABLE,
            1 => USED,
            2 => AVAILABLE | USED,
            _ => 0,
        };
        let flags = u16::from(flags & 0x17) | if self.is_packed() { ring_flags } else { 0 };
        let link = draw.below(u64::from(self.hostile.size) + 2) as u16;
        self.encode((address, len, flags), link)
    }

    fn encode(&self, descriptor: (u64, u32, u16), link: u16) -> [u8; 16] {
        self.other.driver.encode(descriptor, link)
    }

    fn set_descriptor(&self, index: u16, bytes: &[u8; 16]) {
        let at = usize::from(index % self.hostile.size) * 16;
        self.memory.write(at, bytes);
    }

    /// Writes a request by the rules, over what was there, and makes it available.
    fn submit(&mut self, draw: &mut Draw<'_>) {
        let kind = draw.pick(&KINDS);
        let sector = draw.below(DISK_BYTES / 512 + 2);
        let header = DATA_AT + draw.below(16) * 16;
        let numbers = [u64::from(kind), sector];
        self.memory.write(header as usize, &payload(&numbers));
        let data = (GUEST + DATA_AT + 0x1000, draw.pick(&[512, 1024, 16, 0]));
        let is_read = matches!(kind, 0 | 8);
        let data_flags = if is_read { WRITE } else { 0 };
        let status = GUEST + DATA_AT + 0x8000 + draw.below(64);
        let mut chain = vec![(GUEST + header, 16, 0)];
        if data.1 > 0 {
            chain.push((data.0, data.1, data_flags));
        }
        chain.push((status, 1, WRITE));
        chain.truncate(usize::from(self.hostile.size));
        if matches!(kind, 11 | 13) {
            let range = [draw.below(DISK_BYTES / 512), draw.below(64)];
            self.memory
                .write((DATA_AT + 0x1000) as usize, &payload(&range));
        }
        match self.is_packed() {
            false => self.submit_split(&chain, draw.below(u64::from(self.hostile.size)) as u16),
            true => self.submit_packed(&chain),
        }
    }

    fn submit_split(&mut self, chain: &[(u64, u32, u16)], head: u16) {
        let size = self.hostile.size;
        for (place, &(address, len, flags)) in chain.iter().enumerate() {
            let index = (head + place as u16) % size;
            let has_next = place + 1 < chain.len();
            let flags = flags | if has_next { NEXT } else { 0 };
            self.set_descriptor(
                index,
                &self.encode((address, len, flags), (index + 1) % size),
            );
        }
        let place = usize::from(self.next.0 % size);
        self.memory.store_u16(DRIVER_AT + 4 + 2 * place, head);
        self.next.0 = self.next.0.wrapping_add(1);
        self.memory.store_u16(DRIVER_AT + 2, self.next.0);
    }

    fn submit_packed(&mut self, chain: &[(u64, u32, u16)]) {
        for (place, &(address, len, flags)) in chain.iter().enumerate() {
            let (index, wrap) = self.next;
            let bits = if wrap { AVAILABLE } else { USED };
            let has_next = place + 1 < chain.len();
            let flags = flags | bits | if has_next { NEXT } else { 0 };
            self.set_descriptor(index, &self.encode((address, len, flags), index));
            self.next = match index + 1 < self.hostile.size {
                true => (index + 1, wrap),
                false => (0, !wrap),
            };
        }
    }

    async fn step(&mut self, draw: &mut Draw<'_>) {
        match draw.below(16) {
            0 | 1 => {
                let index = draw.below(u64::from(self.hostile.size)) as u16;
                let descriptor = self.descriptor(draw);
                self.set_descriptor(index, &descriptor);
            }
            2 => {
                // A table, a header or data.
                let at = DATA_AT + draw.below(0x100) * 16;
                let bytes = self.descriptor(draw);
                self.memory.write(at as usize, &bytes);
            }
            3 => self.set_field(draw),
            4..=7 => self.submit(draw),
            8..=10 => self.kick().await,
            11 => self.damage_table(draw),
            12 => self.restart(draw).await,
            13 => self.change_server(draw).await,
            14 => {
                let code = if self.has_second_region { 38 } else { 37 };
                let has_changed = self.tell_region(code, 1).await;
                // A ring that works starts again with its table.
                assert!(has_changed || self.is_table_damaged);
                self.has_second_region = !self.has_second_region;
            }
            _ => {
                let part = draw.below(3) as usize;
                self.hostile.parts[part] = USER + draw.below(MEMORY_BYTES / 16) * 16;
            }
        }
    }

    /// Writes a field of the ring beside its descriptors.
    fn set_field(&self, draw: &mut Draw<'_>) {
        let size = self.hostile.size;
        let place = usize::from(draw.below(u64::from(size)) as u16);
        let (at, value) = match draw.below(8) {
            // The index, and far from where it was.
            0 => (DRIVER_AT + 2, draw.number() as u16),
            1 => (
                DRIVER_AT + 2,
                self.next.0.wrapping_add(draw.below(3) as u16),
            ),
            // Events: of the packed ring, or of the split one.
            2 => (DRIVER_AT, draw.number() as u16),
            3 => (DRIVER_AT + 4 + 2 * usize::from(size), self.next.0),
            4 => (DEVICE_AT + 2, draw.number() as u16),
            _ => (
                DRIVER_AT + 4 + 2 * place,
                draw.below(u64::from(size) + 1) as u16,
            ),
        };
        self.memory.store_u16(at, value);
    }

    /// Notifies the hostile queue, and sees that the other one works. A broken ring is reset.
    async fn kick(&mut self) {
        self.hostile.kick.signal().unwrap();
        // An answer, of which there are more than one turn of everything else.
        self.front().ask(17, &[]).await;
        self.identify().await;
        if self.look_at_events() {
            self.stop(0).await;
            self.memory.write(0, &[0; RING_BYTES]);
            self.hostile.base = self.other.first_base;
            self.start_hostile().await;
        }
    }

    /// Looks at what the server has reported. Returns whether the hostile ring is broken.
    fn look_at_events(&self) -> bool {
        let mut is_broken = false;
        for event in self.served.events() {
            match event {
                ServerEvent::QueueBroken { queue, reason } => {
                    assert_eq!(queue, 0, "{reason}");
                    let says_where = reason.contains(|c: char| c.is_ascii_digit());
                    assert!(says_where, "it does not say where: {reason}");
                    is_broken = true;
                }
                other => assert_eq!(other, ServerEvent::Disconnected { reason: None }),
            }
        }
        is_broken
    }

    fn damage_table(&mut self, draw: &mut Draw<'_>) {
        let Some(table) = &self.table else { return };
        let at = draw.below(table.part_bytes / 2) as usize * 2;
        let value = match draw.below(3) {
            0 => draw.number() as u16,
            1 => draw.below(4) as u16,
            _ => self.hostile.size,
        };
        table.memory.store_u16(at, value);
        self.is_table_damaged = true;
    }

    async fn restart(&mut self, draw: &mut Draw<'_>) {
        self.hostile.base = self.stop(0).await;
        match draw.below(4) {
            0 => self.hostile.base = draw.number() as u32,
            1 => self.hostile.size = draw.pick(&[8, 16, 64, 7, 2, 256]),
            _ => {}
        }
        self.start_hostile().await;
    }

    /// The server ends, and another one goes on.
    async fn change_server(&mut self, draw: &mut Draw<'_>) {
        if self.table.is_none() || draw.one_in(2) {
            self.hostile.base = self.stop(0).await;
            self.other.ring.base = self.stop(1).await;
        }
        if let Some(front) = self.front.take() {
            front.leave().await;
        }
        self.connect().await;
        if let Some(table) = &self.table {
            let file = [table.file.as_fd()];
            assert!(self.front().tell(32, &table.description, &file).await);
        }
        self.start_other().await;
        self.start_hostile().await;
    }

    /// A request of the other queue: it is answered, with the disk's serial number.
    async fn identify(&mut self) {
        let (header, data, status) = (RING_BYTES, RING_BYTES + 64, RING_BYTES + 128);
        let memory = Arc::clone(&self.other.memory);
        memory.write(header, &payload(&[8, 0]));
        memory.write(data, &[0; 20]);
        memory.store_u8(status, 0xEE);
        let guest = |at: usize| OTHER_GUEST + at as u64;
        let pieces = [
            (guest(header), 16, false),
            (guest(data), 20, true),
            (guest(status), 1, true),
        ];
        let id = self.other.driver.add(&pieces);
        self.other.ring.kick.signal().unwrap();
        let used = async {
            loop {
                if let Some((used, _)) = self.other.driver.take_used() {
                    return used;
                }
                self.front.as_ref().unwrap().ask(17, &[]).await;
            }
        };
        assert_eq!(in_time("serve the other queue", used).await, id);
        let mut serial = [0; 20];
        memory.read(data, &mut serial);
        assert_eq!((memory.load_u8(status), &serial), (0, SERIAL));
    }

    /// Its connection, whose rings go on without a guest, and the server.
    pub(crate) fn into_parts(self) -> (Front, Served) {
        (self.front.expect("a connection"), self.served)
    }

    /// Sees that the other queue works, ends the connection, and looks at what the server reported.
    pub(crate) async fn end(mut self) {
        self.kick().await;
        self.stop(0).await;
        self.identify().await;
        if let Some(front) = self.front.take() {
            front.leave().await;
        }
        self.look_at_events();
    }
}

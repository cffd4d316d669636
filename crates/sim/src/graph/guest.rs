//! Guests: requests to a disk, one after the other, each checked by the disk's model.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use cowslip::Disk;
use cowslip::image::{Durability, ZeroOptions};
use cowslip_queue::BufMut;

use crate::model::{Granules, Outcome, SECTOR_BYTES, Until, ZERO, fill};
use crate::rng::Rng;

use super::world::{Port, World};

/// Requests that a guest makes while its disk's script lasts.
const REQUESTS_MAX: u64 = 300;

/// Lets others go first.
pub(crate) async fn pause() {
    let mut is_first = true;
    poll_fn(move |context| match std::mem::take(&mut is_first) {
        true => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
        false => Poll::Ready(()),
    })
    .await;
}

/// Makes requests until the script has ended.
pub(crate) async fn serve(world: Rc<World>, port: Rc<Port>, mut rng: Rng) {
    let most = rng.pick(&[1, 4, 16, 64]);
    // Few places, so that requests meet each other and copies.
    let places = rng.pick(&[4, 32, 400]);
    let mut after = rng.below(20);
    for _ in 0..REQUESTS_MAX {
        if port.has_ended.get() {
            if after == 0 {
                break;
            }
            after -= 1;
        }
        while port.is_quiet.get() {
            pause().await;
        }
        port.requests.set(port.requests.get() + 1);
        let end = port.model.borrow().size() / SECTOR_BYTES;
        let start = rng.below(end.min(places));
        let granules = start..start + rng.between(1, most).min(end - start);
        match rng.below(20) {
            0..5 => read(&world, &port, &granules).await,
            5..7 => flush(&world, &port).await,
            deed => change(&world, &port, &granules, deed).await,
        }
        port.requests.set(port.requests.get() - 1);
        world.figures.borrow_mut().requests += 1;
        for _ in 0..rng.below(3) {
            pause().await;
        }
    }
}

async fn read(world: &World, port: &Port, granules: &Granules) {
    let len = (granules.end - granules.start) * SECTOR_BYTES;
    let begun = port.model.borrow_mut().begin_read();
    let buf = BufMut::zeroed(len as usize);
    match port
        .disk
        .read(granules.start * SECTOR_BYTES, buf.into())
        .await
    {
        Ok(found) => {
            let found = found.to_vec();
            let seen = port.model.borrow_mut().end_read(begun, granules, &found);
            if let Err(violation) = seen {
                world.fail(format!("disk {}: {violation}", port.number));
            }
        }
        Err(error) => {
            port.model.borrow_mut().abandon_read(begun);
            world.explain("a read", &error);
        }
    }
}

async fn flush(world: &World, port: &Port) {
    let begun = port.model.borrow_mut().begin_flush();
    let flushed = port.disk.flush().await;
    world.note(port, || format!("a flush since {begun} ends: {flushed:?}"));
    match flushed {
        Ok(()) => port.model.borrow_mut().end_flush(begun),
        Err(error) => world.explain("a flush", &error),
    }
}

async fn change(world: &World, port: &Port, granules: &Granules, deed: u64) {
    let id = world.request_id();
    let (start, len) = (
        granules.start * SECTOR_BYTES,
        (granules.end - granules.start) * SECTOR_BYTES,
    );
    let written = if deed < 16 { id } else { ZERO };
    port.model.borrow_mut().begin_write(id, written, granules);
    world.note(port, || format!("{id} begins ({deed}) {start:#x}+{len:#x}"));
    let durability = Durability::of_fua(deed == 7);
    let (answer, outcome) = match deed {
        0..16 => {
            let mut buf = BufMut::zeroed(len as usize);
            fill(port.model.borrow().grain(), id, granules.clone(), &mut buf);
            let until = match durability {
                Durability::Durable => Until::End,
                Durability::Cached => Until::Flush,
            };
            let data = buf.freeze();
            let done = port.disk.write(start, data.into(), durability).await;
            (done, Outcome::Done(until))
        }
        16..18 => {
            let done = port.disk.zero(start, len, ZeroOptions::default()).await;
            (done, Outcome::Done(Until::Flush))
        }
        _ => (port.disk.discard(start, len).await, Outcome::Perhaps),
    };
    world.note(port, || format!("{id} ends: {answer:?}"));
    let outcome = match answer {
        Ok(()) => outcome,
        Err(error) => {
            world.explain("a change", &error);
            Outcome::Perhaps
        }
    };
    port.model.borrow_mut().end_write(id, granules, outcome);
}

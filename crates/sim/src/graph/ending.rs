//! Ends of sessions, and what each image that may show a disk has to show.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use cowslip::Error;
use cowslip::image::{BackingChoice, Format};
use cowslip_graph::{LiveDisk, Turn};

use crate::disk::Losses;
use crate::drive::{Stop, block_on};
use crate::executor::Executor;
use crate::model::{Model, SECTOR_BYTES, Survival};
use crate::prepare::{self, Lag};
use crate::rng::Rng;

use super::images::{Files, read_all};
use super::world::{Port, World};
use super::{Ending, Run};

impl Run {
    /// Opens the disks as a host does that has started: each from the image that its drive names.
    pub(super) fn open(&mut self) -> Result<Rc<World>, String> {
        let mut world = World {
            files: self.files.clone(),
            ports: Vec::new(),
            nodes: RefCell::default(),
            turn: Turn::new(()),
            spawned: RefCell::default(),
            failure: RefCell::default(),
            figures: Rc::clone(&self.figures),
            next: Rc::clone(&self.next),
            trace: self.trace.clone(),
            aimed: Cell::new(0),
        };
        for number in 0..self.drives.len() {
            let (file, format) = self.drives[number].file.clone();
            let files = self.files.clone();
            let opening = open_chain(world, files, (file, format));
            let opened = block_on(&self.disk, &mut self.rng, "open", opening)?;
            let (filled, node) = opened;
            world = filled;
            let node = node.map_err(|error| format!("a disk does not open: {error}"))?;
            let drive = &self.drives[number];
            world.ports.push(Rc::new(Port {
                number: number as u64,
                disk: LiveDisk::new(format!("port {number}"), node.live.clone() as _),
                node: RefCell::new(node),
                model: Rc::clone(&drive.model),
                also: RefCell::default(),
                bitmap: RefCell::default(),
                kept: Rc::clone(&drive.kept),
                pasts: Rc::clone(&drive.pasts),
                alive: Rc::clone(&drive.alive),
                requests: Cell::new(0),
                is_busy: Cell::new(false),
                is_quiet: Cell::new(false),
                has_ended: Cell::new(false),
            }));
        }
        Ok(Rc::new(world))
    }

    /// Ends a session, and checks what is left of each disk.
    pub(super) fn end(
        &mut self,
        world: Rc<World>,
        (executor, stop): (Executor, Stop),
        ending: Ending,
    ) -> Result<(), String> {
        let shown: Vec<Vec<(String, Format)>> =
            world.ports.iter().map(|port| port.shown_by()).collect();
        drop(executor);
        world.spawned.borrow_mut().clear();
        let ending = match self.disk.faults().flush_failed {
            // The loss of a failed flush is seen on the medium only.
            true => Ending::Crash,
            false => ending,
        };
        let has_closed = match (stop, ending) {
            (Stop::Idle, Ending::Close) => self.close(&world)?,
            _ => false,
        };
        drop(world);
        let (faults, _) = self.disk.delivered();
        let ending = match self.disk.faults().flush_failed {
            true => Ending::Crash,
            false => ending,
        };
        let has_closed = has_closed && ending == Ending::Close;
        self.figures.borrow_mut().faults += faults;
        self.disk.hold_power();
        self.disk.set_faults(&[]);
        let completed = self.disk.counters().completed;
        self.figures.borrow_mut().operations += completed - self.counted;
        self.counted = completed;
        let survival = match (has_closed, ending) {
            (true, _) => Survival::Cached,
            (false, Ending::Kill | Ending::Close) => {
                self.disk.kill(Rng::new(self.rng.bits()));
                Survival::Cached
            }
            (false, Ending::Crash) => {
                self.disk
                    .set_losses(self.rng.pick(&[Losses::Any, Losses::Adverse]));
                let rngs = [Rng::new(self.rng.bits()), Rng::new(self.rng.bits())];
                let [rng, next] = rngs;
                self.disk = self.disk.crash(rng, next);
                self.files = Files::new(self.disk.clone());
                self.counted = 0;
                Survival::Durable
            }
        };
        {
            let mut figures = self.figures.borrow_mut();
            match has_closed {
                true => figures.closes += 1,
                false => figures.crashes += 1,
            }
        }
        self.disk.issued_flush();
        if !has_closed || faults > 0 {
            // Which bitmaps are left is seen in the images.
            for drive in &self.drives {
                drive.alive.borrow_mut().clear();
            }
        }
        for (number, files) in shown.iter().enumerate() {
            self.check_drive((number, files), survival)
                .map_err(|what| format!("disk {number} after {ending:?}: {what}"))?;
        }
        Ok(())
    }

    /// Closes all images; whether all were closed in order.
    fn close(&mut self, world: &Rc<World>) -> Result<bool, String> {
        let nodes = world.nodes.borrow().clone();
        let begun: Vec<u64> = world
            .ports
            .iter()
            .map(|port| port.model.borrow_mut().begin_flush())
            .collect();
        let closing = async move {
            let mut closed = Ok(());
            // Those above were added later.
            for node in nodes.iter().rev() {
                closed = closed.and(node.close().await);
            }
            closed
        };
        let closed: Result<(), Error> = block_on(&self.disk, &mut self.rng, "close", closing)?;
        match closed {
            Ok(()) => {
                for (port, begun) in world.ports.iter().zip(begun) {
                    port.model.borrow_mut().end_flush(begun);
                }
                Ok(true)
            }
            Err(error) => {
                world.explain("closing", &error);
                match world.failure.borrow_mut().take() {
                    Some(what) => Err(what),
                    None => Ok(false),
                }
            }
        }
    }

    /// Reads a disk through each image that may show it. The next session opens one of them.
    fn check_drive(
        &mut self,
        (number, files): (usize, &[(String, Format)]),
        survival: Survival,
    ) -> Result<(), String> {
        let chosen = self.rng.index(files.len());
        let mut before = self.drives[number].model.borrow().clone();
        before.crash();
        for (index, file) in files.iter().enumerate() {
            let mut model = before.clone();
            self.check_image(file, (&mut model, survival))
                .map_err(|what| format!("{}: {what}", file.0))?;
            if index == chosen {
                *self.drives[number].model.borrow_mut() = model;
            }
        }
        self.drives[number].file = files[chosen].clone();
        let kept = self.drives[number].kept.borrow().clone();
        for kept in kept {
            let bytes = self.read(&(kept.file.clone(), kept.format))?;
            kept.check_whole(&bytes)?;
        }
        Ok(())
    }

    fn check_image(
        &mut self,
        file: &(String, Format),
        (model, survival): (&mut Model, Survival),
    ) -> Result<(), String> {
        for file in self.chain_of(file)? {
            let content = self.disk.content(&file).ok_or("an image is missing")?;
            if crate::inspect::is_image(&content) {
                let examined = prepare::examine(&file, (&self.disk, Lag::default()), &mut self.rng);
                examined.map_err(|what| format!("{file}: {what}"))?;
            }
        }
        let bytes = self.read(file)?;
        let violation = |violation: crate::model::Violation| violation.to_string();
        model
            .adopt_size(bytes.len() as u64, survival)
            .map_err(violation)?;
        for window in model.windows() {
            let granules = model.on_disk(&window);
            let sectors =
                (granules.start * SECTOR_BYTES) as usize..(granules.end * SECTOR_BYTES) as usize;
            model
                .adopt(&granules, &bytes[sectors], survival)
                .map_err(violation)?;
        }
        Ok(())
    }

    /// The files of a chain, without repetition.
    fn chain_of(&mut self, (file, format): &(String, Format)) -> Result<BTreeSet<String>, String> {
        let (files, file, format) = (self.files.clone(), file.clone(), *format);
        let work = async move {
            let image = files.open((&file, format), false, BackingChoice::AsNamed);
            let image = image.await?;
            let names = image.layers().into_iter().map(|layer| layer.name);
            let names: BTreeSet<String> = names.collect();
            image.close().await?;
            Ok::<_, Error>(names)
        };
        let names = block_on(&self.disk, &mut self.rng, "open", work)?;
        names.map_err(|error| format!("it does not open: {error}"))
    }

    fn read(&mut self, (file, format): &(String, Format)) -> Result<Vec<u8>, String> {
        let (files, file, format) = (self.files.clone(), file.clone(), *format);
        let work = async move {
            let image = files.open((&file, format), false, BackingChoice::AsNamed);
            let image = image.await?;
            let read = read_all(&image).await?;
            image.close().await?;
            Ok::<_, Error>(read)
        };
        let read = block_on(&self.disk, &mut self.rng, "read", work)?;
        read.map_err(|error| format!("it does not open or cannot be read: {error}"))
    }
}

/// Opens the images of a chain, each alone, and puts them over each other.
async fn open_chain(
    world: World,
    files: Files,
    (file, format): (String, Format),
) -> (World, Result<Rc<super::world::Node>, Error>) {
    let opened = async {
        let image = files.open((&file, format), false, BackingChoice::AsNamed);
        let image = image.await?;
        let layers: Vec<(String, Format)> = image
            .layers()
            .into_iter()
            .map(|layer| (layer.name, layer.format))
            .collect();
        image.close().await?;
        let mut below = None;
        for (depth, (name, format)) in layers.iter().enumerate().rev() {
            let node = world.add((name, *format), depth == 0, below.take());
            below = Some(node.await?);
        }
        Ok(below.expect("there is a layer"))
    };
    let opened = opened.await;
    (world, opened)
}

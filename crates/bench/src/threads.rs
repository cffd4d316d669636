//! `bench threads`: what more threads on one image are worth. The image's data is in a file that
//! keeps nothing (`null-co`), so nothing but the engine takes time: its tables are in memory after
//! a few requests. Beside the threads are as many processes, each with an image of its own, which
//! share the processors alone; and qemu-img on the same.

use std::path::Path;
use std::process::Command;

use cowslip_console::error::{CommandError, failed};
use cowslip_console::interrupt::RemovedOnInterrupt;
use serde_json::Value;

use crate::cell::{Backing, Before, Cell, Contestant, Direction, Layout, Shape, Subclusters};
use crate::conditions::line_of;
use crate::description::Description;
use crate::report::{Column, Measurement, column};
use crate::run::{Run, run};
use crate::scale::Scale;
use crate::stage::{Stage, Turn};

const CLUSTER_BYTES: u64 = 64 << 10;
const REQUEST_BYTES: u64 = 4096;
/// Threads that share an image.
const THREADS: [u16; 3] = [1, 2, 4];
/// Processes beside them.
const PROCESSES: u16 = 2;
/// Places of ours; qemu-img knows steps alone.
const SEED: &str = "--random=1";

/// CPU time of a request, of all threads.
const CPU: Column = column("CPU us", 2);

/// The table.
pub const TABLE: Description = Description {
    disk_bytes: 1 << 30,
    quick_disk_bytes: 256 << 20,
    // Seconds, without a device.
    requests: 2_000_000,
    policies: &["auto"],
    // Tables of images alone.
    files_bytes: |_| 0,
    note: Some("Of each thread and process as many requests are in flight as the depth says."),
    measure,
    ..Description::usual("threads", cells)
};

fn cells(scale: &Scale) -> Vec<Cell> {
    let mut shape = Shape::new(CLUSTER_BYTES, Subclusters::Off, Backing::None);
    shape.before = Before::Laid(Layout::Contiguous);
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for direction in [Direction::Read, Direction::Write] {
            let ours = THREADS.into_iter().map(Contestant::CowslipThreads);
            let others = [Contestant::CowslipProcesses(PROCESSES), Contestant::QemuImg];
            let mut load = scale.writes(*depth, REQUEST_BYTES);
            // Places come again: there is nothing that the first visit would change.
            load.requests = scale.requests_of(*depth);
            load.direction = direction;
            cells.push(Cell::new(shape, load, ours.chain(others).collect()));
        }
    }
    cells
}

/// Makes one run.
///
/// # Errors
/// A program fails, or prints no figures.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let processes = match turn.contestant {
        Contestant::CowslipProcesses(count) => count,
        _ => 1,
    };
    let images = (0..processes).map(|index| image(stage, index));
    let images: Vec<_> = images.collect::<Result<_, _>>()?;
    let commands = images
        .iter()
        .map(|image| command(stage, cell, turn.contestant, image.path()));
    let mut commands: Vec<Command> = commands.collect();
    let line = line_of(&commands[0]);
    let runs: Vec<Result<Run, CommandError>> = std::thread::scope(|scope| {
        let running = commands
            .iter_mut()
            .map(|command| scope.spawn(|| run(command)));
        let running: Vec<_> = running.collect();
        let runs = running.into_iter();
        runs.map(|run| run.join().expect("a program is run without a panic"))
            .collect()
    });
    let (mut iops, mut cpu_seconds) = (0.0, 0.0);
    let share = cell.load.requests / u64::from(processes);
    for run in runs {
        let run = run?;
        iops += share as f64 / seconds(&run.output)?;
        cpu_seconds += run.cpu_seconds;
    }
    let mut measurement = Measurement::new(iops, Value::Null, Some(line));
    measurement.add(CPU, Some(cpu_seconds * 1e6 / cell.load.requests as f64));
    Ok(measurement)
}

/// The image of this number, made if it is not there. It is one with an external data file, all of
/// which has its place in the tables.
fn image(stage: &Stage<'_>, index: u16) -> Result<RemovedOnInterrupt, CommandError> {
    let path = stage.directory().join(format!("tables-{index}.qcow2"));
    if !path.exists() {
        let data = RemovedOnInterrupt::new(&path.with_extension("raw"));
        let mut create = Command::new(stage.cowslip());
        create.args(["create", "-q", "-f", "qcow2", "-o"]);
        create.arg(format!(
            "cluster_size={CLUSTER_BYTES},preallocation=metadata,data_file={}",
            data.path().display().to_string().replace(',', ",,")
        ));
        run(create.arg(&path).arg(stage.disk_bytes().to_string()))?;
        std::fs::remove_file(data.path()).map_err(|e| failed("remove", data.path(), &e))?;
    }
    Ok(RemovedOnInterrupt::new(&path))
}

fn command(stage: &Stage<'_>, cell: &Cell, contestant: Contestant, image: &Path) -> Command {
    let data = format!(
        "data-file.driver=null-co,data-file.size={}",
        stage.disk_bytes()
    );
    let mut command = stage.bench_with_options(contestant, image, &data);
    let mut load = cell.load;
    if let Contestant::CowslipProcesses(count) = contestant {
        load.requests /= u64::from(count);
    }
    command.args(stage.load_words(&load));
    match contestant {
        Contestant::QemuImg => {}
        Contestant::CowslipThreads(count) => {
            command.args(["--json", SEED, &format!("--threads={count}")]);
        }
        _ => drop(command.args(["--json", SEED])),
    }
    command
}

/// How long the requests took: ours in JSON, qemu-img's "Run completed in 0.123 seconds.".
fn seconds(output: &str) -> Result<f64, CommandError> {
    let ours: Value = serde_json::from_str(output).unwrap_or_default();
    let theirs = || {
        output
            .split("completed in ")
            .nth(1)?
            .split(' ')
            .next()?
            .parse()
            .ok()
    };
    let seconds = ours["seconds"].as_f64().or_else(theirs);
    seconds.ok_or_else(|| CommandError::new(format!("no figures, but:\n{}", output.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_read_from_both() {
        assert_eq!(seconds(r#"{"seconds": 0.5}"#).unwrap(), 0.5);
        assert_eq!(
            seconds("Sending 1\nRun completed in 2.250 seconds.\n").unwrap(),
            2.25
        );
        assert!(
            seconds("Killed")
                .unwrap_err()
                .to_string()
                .contains("Killed")
        );
    }
}

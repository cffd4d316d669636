//! The model: allocation groups and writers simulated, at sizes that no machine here holds, under
//! several rules.
//!
//! Its constants are fitted on every second row of real runs, and its error is what it is off on
//! the others. Real runs come with it ([`RUNS`], of `bench writers --loop xfs,ext4 --json`, cut
//! down to what is needed); `--fit` takes others.

use std::path::Path;

use cowslip::growth::{Rule, Steps};
use cowslip_console::error::CommandError;
use cowslip_console::output;
use cowslip_testbed::Spread;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cell::{
    self, BYTES_OF_A_CELL, Cell, Help, Pattern as CellPattern, Target, WRITE_BYTES,
    filesystem_bytes,
};

mod simulate;
mod space;

use simulate::{Allocation, Constants, Outcome, Pattern, Scene, simulate};

/// Rows of real runs.
const RUNS: &str = include_str!("model/runs.json");
/// A model that is off by more is called a sketch.
const SKETCH_FROM: f64 = 0.25;
/// Number of rows from which on one half can be compared with the other.
const ROWS_MIN: usize = 8;
/// Bytes that are simulated of a file under a rule without large steps; the rest goes on in the
/// same way.
const SAMPLE_BYTES: u64 = 256 << 20;
const XFS_EXTENT_BYTES: u64 = ((1 << 21) - 1) * 4096;
const EXT4_EXTENT_BYTES: u64 = 128 << 20;

/// Fields that are needed of a report of real runs.
#[derive(Deserialize)]
struct Runs {
    conditions: RunConditions,
    rows: Vec<RunRow>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RunConditions {
    bytes_of_a_cell: u64,
}

#[derive(Deserialize)]
struct RunRow {
    filesystem: String,
    cell: String,
    extents: RunExtents,
}

#[derive(Deserialize)]
struct RunExtents {
    median: f64,
}

/// A real row beside what the model says of it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Compared {
    filesystem: String,
    cell: String,
    real: f64,
    model: f64,
    fitted: bool,
}

/// How well the model does.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Fit {
    constants: Constants,
    /// The mean of |model - real| / real over the rows that were fitted.
    error_of_fit: f64,
    /// The same over the others.
    error: f64,
    is_sketch: bool,
    rows: Vec<Compared>,
}

fn median(outcome: &Outcome) -> f64 {
    let extents = outcome.files.iter().map(|(_, extents)| *extents as f64);
    Spread::of(extents.collect()).map_or(0.0, |spread| spread.median)
}

/// The scene of a real row; `None` of what the model does not know.
fn scene_of(row: &RunRow, bytes: u64) -> Option<Scene> {
    let cell: Cell = cell::all().into_iter().find(|c| c.name() == row.cell)?;
    let is_xfs = match row.filesystem.as_str() {
        "xfs" => true,
        "ext4" => false,
        _ => return None,
    };
    let allocation = match (cell.target, cell.help) {
        (Target::Direct, Help::None) if is_xfs => Allocation::Direct(Rule::None),
        (Target::Direct, Help::None) => Allocation::Ext4,
        (Target::Direct, Help::Rule(rule)) => Allocation::Direct(rule),
        (Target::Buffered, Help::None) if is_xfs => Allocation::Xfs,
        (Target::Buffered, Help::None) => Allocation::Delayed,
        _ => return None,
    };
    let pattern = match cell.pattern {
        CellPattern::Stream => Pattern::Stream,
        CellPattern::Reopen if cell.pace.is_none() => Pattern::Reopen,
        CellPattern::Restart => Pattern::Restart,
        CellPattern::Small => Pattern::Small,
        _ => return None,
    };
    let volume_bytes = filesystem_bytes(bytes);
    Some(Scene {
        writers: cell.writers,
        bytes: bytes / cell.writers as u64,
        write_bytes: WRITE_BYTES,
        volume_bytes,
        group_bytes: if is_xfs {
            volume_bytes / 4
        } else {
            EXT4_EXTENT_BYTES
        },
        extent_bytes: if is_xfs {
            XFS_EXTENT_BYTES
        } else {
            EXT4_EXTENT_BYTES
        },
        allocation,
        pattern,
    })
}

fn fit(runs: &Runs) -> Option<Fit> {
    let known = runs.rows.iter().filter_map(|row| {
        let scene = scene_of(row, runs.conditions.bytes_of_a_cell)?;
        (row.extents.median > 0.0).then_some((row, scene))
    });
    let known: Vec<(&RunRow, Scene)> = known.collect();
    if known.len() < ROWS_MIN {
        return None;
    }
    let is_fitted = |index: usize| index.is_multiple_of(2);
    let distance = |constants: &Constants| -> f64 {
        let fitted = known
            .iter()
            .enumerate()
            .filter(|(index, _)| is_fitted(*index));
        let ratios = fitted
            .map(|(_, (row, scene))| median(&simulate(scene, constants, 1)) / row.extents.median);
        // Not squared: a few rows that it does not know the reason of should not decide.
        ratios.map(|ratio| ratio.ln().abs()).sum()
    };
    let turns = [1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0];
    let candidates = turns.into_iter().flat_map(|writes_in_a_row| {
        (18..30).map(move |shift| Constants {
            writes_in_a_row,
            writeback_bytes: 1 << shift,
        })
    });
    let measured = candidates.map(|constants| (distance(&constants), constants));
    let (_, constants) = measured.min_by(|a, b| a.0.total_cmp(&b.0))?;
    let rows = known
        .iter()
        .enumerate()
        .map(|(index, (row, scene))| Compared {
            filesystem: row.filesystem.clone(),
            cell: row.cell.clone(),
            real: row.extents.median,
            // Another seed than that of the fit.
            model: median(&simulate(scene, &constants, 2)),
            fitted: is_fitted(index),
        });
    let rows: Vec<Compared> = rows.collect();
    let error_of = |fitted: bool| {
        let rows = rows.iter().filter(|row| row.fitted == fitted);
        let errors: Vec<f64> = rows
            .map(|row| (row.model - row.real).abs() / row.real)
            .collect();
        errors.iter().sum::<f64>() / errors.len().max(1) as f64
    };
    let (error_of_fit, error) = (error_of(true), error_of(false));
    Some(Fit {
        constants,
        error_of_fit,
        error,
        is_sketch: error > SKETCH_FROM,
        rows,
    })
}

/// A rule by its name.
struct Candidate {
    name: &'static str,
    allocation: Allocation,
}

fn candidates() -> Vec<Candidate> {
    let plain = cell::SEED_STEPS;
    let steps = |steps| Allocation::Direct(Rule::Dynamic(steps));
    // Steps with another limit than XFS's longest extent.
    let steps_of_8_gib = steps(Steps {
        max_bytes: plain.max_bytes,
        ..Steps::DYNAMIC
    });
    let ample = |ample_fraction, leap_times| {
        steps(Steps {
            ample_fraction,
            leap_times,
            ..Steps::DYNAMIC
        })
    };
    let all = [
        ("none", Allocation::Direct(Rule::None)),
        ("fixed 1 MiB", Allocation::Direct(Rule::Fixed(1 << 20))),
        ("fixed 1 GiB", Allocation::Direct(Rule::Fixed(1 << 30))),
        (
            "double the last",
            steps(Steps {
                doubling_bytes: plain.max_bytes,
                ..plain
            }),
        ),
        (
            "half of the size",
            steps(Steps {
                doubling_bytes: plain.first_bytes,
                ..plain
            }),
        ),
        ("seed: both", steps(plain)),
        ("leaps, free/4096", ample(4096, 64)),
        ("ours", Allocation::Direct(Rule::DYNAMIC)),
        ("leaps, free/256", ample(256, 64)),
        ("leaps of 16", ample(1024, 16)),
        ("leaps of 8 GiB", steps_of_8_gib),
        ("XFS, delayed", Allocation::Xfs),
    ];
    let all = all.map(|(name, allocation)| Candidate { name, allocation });
    all.into_iter().collect()
}

/// A simulated row.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    scene: String,
    rule: &'static str,
    extents_min: f64,
    extents_median: f64,
    extents_max: f64,
    perfect: f64,
    over_perfect: f64,
    peak_unused_gib: f64,
    /// Peak of unused space, in percent of the written bytes.
    peak_unused_percent: f64,
    short_of_space: u64,
    /// A part was simulated, and the rest taken to be like it.
    is_extrapolated: bool,
}

const GIB: u64 = 1 << 30;

fn scenes() -> Vec<(String, Scene)> {
    let scene = |writers, bytes, volume_bytes: u64, pattern| Scene {
        writers,
        bytes,
        write_bytes: WRITE_BYTES,
        volume_bytes,
        group_bytes: (volume_bytes / 4).min(1 << 40),
        extent_bytes: XFS_EXTENT_BYTES,
        allocation: Allocation::Direct(Rule::None),
        pattern,
    };
    let mut scenes = Vec::new();
    for writers in [4, 16, 64] {
        let name = format!("{writers} x 64 GiB, 15 TiB");
        let volume_bytes = super::space::FILESYSTEM_BYTES;
        scenes.push((
            name,
            scene(writers, 64 * GIB, volume_bytes, Pattern::Stream),
        ));
    }
    let more = [
        (
            "16 x 16 GiB, 1 TiB",
            scene(16, 16 * GIB, 1 << 40, Pattern::Stream),
        ),
        (
            "32 x 16 GiB reopened, 16 TiB",
            scene(32, 16 * GIB, 1 << 44, Pattern::Reopen),
        ),
        (
            "small files, 16 x 2 GiB, 1 TiB",
            scene(16, 2 * GIB, 1 << 40, Pattern::Small),
        ),
        (
            "16 x 16 GiB cut half way, 1 TiB",
            scene(16, 16 * GIB, 1 << 40, Pattern::Restart),
        ),
        (
            "16 x 16 GiB, 320 GiB",
            scene(16, 16 * GIB, 320 * GIB, Pattern::Stream),
        ),
    ];
    scenes.extend(more.map(|(name, scene)| (name.to_string(), scene)));
    scenes
}

fn row(name: &str, scene: &Scene, candidate: &Candidate, constants: &Constants) -> Row {
    let has_large_steps = match candidate.allocation {
        Allocation::Direct(Rule::None) => false,
        Allocation::Direct(Rule::Fixed(bytes)) => bytes >= SAMPLE_BYTES,
        Allocation::Direct(Rule::Dynamic(_)) | Allocation::Delayed | Allocation::Xfs => true,
        Allocation::Ext4 => false,
    };
    let is_extrapolated = !has_large_steps && scene.pattern != Pattern::Small;
    let bytes = match is_extrapolated {
        true => scene.bytes.min(SAMPLE_BYTES),
        false => scene.bytes,
    };
    let played = Scene {
        bytes,
        allocation: candidate.allocation,
        ..*scene
    };
    let outcome = simulate(&played, constants, 3);
    let times = scene.bytes as f64 / bytes as f64;
    let extents = outcome
        .files
        .iter()
        .map(|(_, extents)| *extents as f64 * times);
    let spread = Spread::of(extents.collect());
    let perfect = outcome.files.iter().map(|(size, _)| {
        let size = *size as f64 * times;
        (size / scene.extent_bytes as f64).ceil()
    });
    let perfect = Spread::of(perfect.collect()).map_or(1.0, |spread| spread.median);
    let written = scene.bytes as f64 * scene.writers as f64;
    let peak = outcome.peak_unused_bytes as f64;
    let (min, middle, max) = spread.map_or((0.0, 0.0, 0.0), |s| (s.least, s.median, s.greatest));
    Row {
        scene: name.to_string(),
        rule: candidate.name,
        extents_min: min,
        extents_median: middle,
        extents_max: max,
        perfect,
        over_perfect: max / perfect,
        peak_unused_gib: peak / GIB as f64,
        peak_unused_percent: peak * 100.0 / written,
        short_of_space: outcome.short_of_space,
        is_extrapolated,
    }
}

/// Fits, simulates, and prints.
///
/// # Errors
/// The real runs cannot be read.
pub fn run(file: Option<&Path>, is_json: bool) -> Result<(), CommandError> {
    let text = match file {
        None => RUNS.to_string(),
        Some(path) => std::fs::read_to_string(path).map_err(|error| {
            let words = cowslip::error::system_words(&error);
            CommandError::new(format!("Could not read '{}': {words}", path.display()))
        })?,
    };
    let runs: Runs = serde_json::from_str(&text).map_err(|error| {
        CommandError::new(format!("These are no rows of 'bench writers': {error}"))
    })?;
    if !BYTES_OF_A_CELL.contains(&runs.conditions.bytes_of_a_cell) {
        let text =
            "These are no rows of 'bench writers': its writers write from 64 MiB to 4 TiB together";
        return Err(CommandError::new(text));
    }
    let too_few = || {
        let text = format!(
            "There are not {ROWS_MIN} rows that the model knows: half of them are to be held against it"
        );
        CommandError::new(text)
    };
    let fit = fit(&runs).ok_or_else(too_few)?;
    let mut rows = Vec::new();
    for (name, scene) in scenes() {
        for candidate in candidates() {
            rows.push(row(&name, &scene, &candidate, &fit.constants));
        }
    }
    match is_json {
        true => output::print(&(output::json_text(&json!({ "fit": fit, "rows": rows })) + "\n")),
        false => output::print(&text_of(&fit, &rows)),
    }
    Ok(())
}

fn text_of(fit: &Fit, rows: &[Row]) -> String {
    let Constants {
        writes_in_a_row,
        writeback_bytes,
    } = fit.constants;
    let mut text = format!(
        "Fitted on {} real rows: {writes_in_a_row} writes in a row, {} KiB written back at a time; off by {:.0} % there, \
         by {:.0} % on the {} others: {}.\n\n",
        fit.rows.iter().filter(|row| row.fitted).count(),
        writeback_bytes >> 10,
        fit.error_of_fit * 100.0,
        fit.error * 100.0,
        fit.rows.iter().filter(|row| !row.fitted).count(),
        match fit.is_sketch {
            true => "a sketch",
            false => "a model",
        }
    );
    for row in &fit.rows {
        text += &format!(
            "{:5} {:32} real {:6.0}  model {:6.0}{}\n",
            row.filesystem,
            row.cell,
            row.real,
            row.model,
            if row.fitted { "  (fitted)" } else { "" }
        );
    }
    text += &format!(
        "\n{:34} {:18} {:>22} {:>8} {:>7} {:>16} {:>6}\n",
        "scene", "rule", "extents min/med/max", "perfect", "x max", "peak GiB (%)", "short"
    );
    for row in rows {
        text += &format!(
            "{:34} {:18} {:>22} {:>8.0} {:>7.1} {:>16} {:>6}{}\n",
            row.scene,
            row.rule,
            format!(
                "{:.0}/{:.0}/{:.0}",
                row.extents_min, row.extents_median, row.extents_max
            ),
            row.perfect,
            row.over_perfect,
            format!(
                "{:.1} ({:.0})",
                row.peak_unused_gib, row.peak_unused_percent
            ),
            row.short_of_space,
            if row.is_extrapolated { " *" } else { "" }
        );
    }
    text + "* a part was simulated; the rest is taken to go on like it\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_that_come_with_the_model_fit_it() {
        let runs: Runs = serde_json::from_str(RUNS).unwrap();
        let fit = fit(&runs).unwrap();
        // The figures of docs/writers.md.
        assert_eq!(fit.rows.len(), 48);
        let percent = |error: f64| (error * 100.0).round();
        assert_eq!(
            (percent(fit.error_of_fit), percent(fit.error)),
            (29.0, 56.0)
        );
        assert!(fit.is_sketch);
    }

    #[test]
    fn real_rows_of_a_known_process_give_back_its_constants() {
        let truth = Constants {
            writes_in_a_row: 2.0,
            writeback_bytes: 4 << 20,
        };
        let cells = cell::all().into_iter().map(|cell| cell.name());
        let rows = cells.flat_map(|cell| ["xfs", "ext4"].map(|name| (name, cell.clone())));
        let rows = rows.filter_map(|(name, cell)| {
            let mut row = RunRow {
                filesystem: name.to_string(),
                cell,
                extents: RunExtents { median: 0.0 },
            };
            let scene = scene_of(&row, 256 << 20)?;
            row.extents.median = median(&simulate(&scene, &truth, 1));
            Some(row)
        });
        let runs = Runs {
            rows: rows.collect(),
            conditions: RunConditions {
                bytes_of_a_cell: 256 << 20,
            },
        };
        let fit = fit(&runs).unwrap();
        assert_eq!(fit.constants, truth);
        assert!(fit.error < 0.1, "{}", fit.error);
    }

    #[test]
    fn space_ahead_has_the_effect_that_the_source_describes() {
        let constants = Constants {
            writes_in_a_row: 1.5,
            writeback_bytes: 16 << 20,
        };
        let (name, scene) = &scenes()[0];
        let of = |rule| {
            let all = candidates();
            let candidate = all.iter().find(|c| c.name == rule).unwrap();
            row(name, scene, candidate, &constants)
        };
        assert_eq!(of("ours").scene, *name);
        // 4 x 64 GiB: 64 extents with allocsize=1g, 9 with dynamic steps, hundreds without.
        assert_eq!(of("fixed 1 GiB").extents_median, 64.0);
        assert!(of("none").extents_median > 10_000.0);
        assert!(of("seed: both").extents_max < 48.0);
        assert!(of("ours").over_perfect <= 1.5);
    }
}

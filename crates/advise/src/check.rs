//! How well the model fits: its predictions beside what was measured.

use serde_json::{Value, json};

use crate::facts::FileSystem;
use crate::figures::{Measured, figure, measured};
use crate::model::{self, Layout};

/// A prediction that differs from the measurement by more than this factor is wrong.
pub const WRONG_AT: f64 = 1.5;

/// A prediction beside its measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// The question.
    pub question: String,
    /// The file system.
    pub on: String,
    /// The circumstances, for people.
    pub circumstances: String,
    /// The measured value.
    pub measured: f64,
    /// The predicted one.
    pub predicted: f64,
    /// The document that has the measurement.
    pub source: String,
}

impl Compared {
    /// The prediction over the measurement.
    pub fn ratio(&self) -> f64 {
        self.predicted / self.measured
    }

    /// The model is wrong there.
    pub fn is_wrong(&self) -> bool {
        let ratio = self.ratio();
        !(1.0 / WRONG_AT..=WRONG_AT).contains(&ratio)
    }
}

/// All predictions beside their measurements.
pub fn compare() -> Vec<Compared> {
    measured()
        .filter_map(|measured| {
            let predicted = predict(&measured)?;
            Some(Compared {
                question: measured.question.to_string(),
                on: measured.on.to_string(),
                circumstances: shown(measured.circumstances),
                measured: measured.value,
                predicted,
                source: measured.source.to_string(),
            })
        })
        .collect()
}

/// Predictions beside the results of `bench subclusters --json`, of a machine of your own: first
/// writes of each cell, times the better of its sparse and its allocated raw file. Cells without
/// such rows are left out.
pub fn of_bench(results: &Value, source: &str) -> Vec<Compared> {
    let number = |name: &str| results["conditions"][name].as_f64();
    let disk = number("disk-bytes").unwrap_or(GIB);
    let writes = number("requests").unwrap_or(2000.0);
    let rows = results["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let text = |row: &Value, name: &str| row[name].as_str().unwrap_or_default().to_string();
    let ours = rows.iter().filter(|row| row["contestant"] == "cowslip");
    let mut all = Vec::new();
    for row in ours {
        let (place, cell) = (text(row, "filesystem"), text(row, "cell"));
        let on = file_system_of(&results["conditions"], &place);
        let of = |contestant: &str| {
            let same = |other: &&Value| {
                other["filesystem"] == row["filesystem"]
                    && other["cell"] == row["cell"]
                    && other["contestant"] == contestant
            };
            rows.iter().find(same)?["median-iops"].as_f64()
        };
        let raw = of("raw sparse").into_iter().chain(of("raw allocated"));
        let raw = raw.reduce(f64::max).filter(|raw| *raw > 0.0);
        let beside_raw = match (of("cowslip"), raw) {
            (Some(ours), Some(raw)) => Some(ours / raw),
            // Rows of an interrupted run may have what it was compared with.
            _ => row["times-raw-first-touch"].as_f64(),
        };
        let (Some(measured), Some(layout)) = (beside_raw, layout_of(&cell)) else {
            continue;
        };
        let share = model::first_share(writes, disk, layout.unit_bytes as f64);
        let predicted = model::first_writes_beside_raw(&layout, share, FileSystem::of(&on));
        all.push(Compared {
            question: "first-writes".to_string(),
            on,
            circumstances: cell,
            measured,
            predicted,
            source: source.to_string(),
        });
    }
    all
}

const GIB: f64 = 1073741824.0;

/// The file system of a place, which has a name of its own where the bench has made none: `here`.
fn file_system_of(conditions: &Value, place: &str) -> String {
    let places = conditions["places"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let found = places.iter().find(|it| it["filesystem"] == place);
    let kind = found.and_then(|it| it["stack"]["filesystem-type"].as_str());
    kind.unwrap_or(place).to_string()
}

/// The layout of a cell: `64K, empty` or `64K/2K, backed`, with `, depth 8` or without.
fn layout_of(cell: &str) -> Option<Layout> {
    let mut words = cell.split(", ");
    let (sizes, state) = (words.next()?, words.next()?);
    if !words.all(|word| word.starts_with("depth ")) {
        return None;
    }
    let (cluster, unit) = sizes.split_once('/').unwrap_or((sizes, sizes));
    Some(Layout {
        cluster_bytes: short_size(cluster)?,
        unit_bytes: short_size(unit)?,
        is_backed: match state {
            "backed" => true,
            "empty" => false,
            _ => return None,
        },
        is_sparse: false,
    })
}

/// A size as tables have it: `512`, `64K`, `2M`.
fn short_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        _ => return None,
    };
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
}

/// Powers of two as people write them.
fn shown(circumstances: &str) -> String {
    let words = circumstances.split(' ').map(|word| {
        let Some((name, value)) = word.split_once('=') else {
            return word.to_string();
        };
        match value.parse::<u64>() {
            Ok(bytes) if bytes >= 4096 && bytes.is_power_of_two() => {
                format!("{name}={}", crate::rules::human(bytes).replace(' ', ""))
            }
            _ => word.to_string(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The model's answer to a question.
fn predict(measured: &Measured) -> Option<f64> {
    let on = FileSystem::of(measured.on);
    let number = |name: &str| measured.number(name);
    let bytes = |name: &str| number(name) as u64;
    let share = |unit| model::first_share(number("writes"), number("disk"), unit);
    Some(match measured.question {
        "first-writes" => {
            let layout = Layout {
                cluster_bytes: bytes("cluster"),
                unit_bytes: bytes("unit"),
                is_backed: number("backed") > 0.0,
                is_sparse: false,
            };
            model::first_writes_beside_raw(&layout, share(number("unit")), on)
        }
        "copy-cost" => {
            let rate = |unit: &str| {
                let layout = Layout {
                    cluster_bytes: 65_536,
                    unit_bytes: bytes(unit),
                    is_backed: true,
                    is_sparse: false,
                };
                model::first_writes(&layout, share(number(unit)), on)
            };
            rate("unit") / rate("fine")
        }
        "table-memory" => {
            let layout = (bytes("cluster"), number("extended") > 0.0);
            let tables = model::table_bytes(bytes("disk"), layout, number("scattered"));
            model::speed_with_misses(model::misses(tables, bytes("budget")))
        }
        "in-order" => model::in_order(bytes("bytes"), bytes("runs"), false, on),
        "discard-space" => model::churn(bytes("cluster"), number("sparse") > 0.0, on),
        "preallocation" => model::preallocated_writes(measured.word("kind")?, on),
        "chain-memory-mib" => model::chain_mib(bytes("depth")),
        "chain-open-ms" => figure("layer-open-ms", on) * number("depth"),
        "qemu-read-us" => model::qemu_read_us(bytes("depth")),
        _ => return None,
    })
}

/// The comparison in words.
pub fn as_text(all: &[Compared]) -> String {
    let mut text = String::new();
    let mut last = "";
    for compared in all {
        if compared.question != last {
            last = &compared.question;
            text += &format!("\n{last}\n");
        }
        let mark = if compared.is_wrong() {
            "  <- wrong"
        } else {
            ""
        };
        text += &format!(
            "  {:5} {:58} measured {:>10.3}  model {:>10.3}  ratio {:.2}{mark}\n",
            compared.on,
            compared.circumstances,
            compared.measured,
            compared.predicted,
            compared.ratio()
        );
    }
    let wrong = all.iter().filter(|compared| compared.is_wrong()).count();
    text += &format!(
        "\n{} measurements: typically off by a factor of {:.2}; wrong (by more than {WRONG_AT}) in \
         {wrong}\n",
        all.len(),
        typical(all)
    );
    text
}

/// The factor by which a prediction is off: the mean square of the logarithms.
pub fn typical(all: &[Compared]) -> f64 {
    let squares = all.iter().map(|compared| compared.ratio().ln().powi(2));
    (squares.sum::<f64>() / all.len().max(1) as f64)
        .sqrt()
        .exp()
}

/// The comparison for programs.
pub fn as_json(all: &[Compared]) -> Value {
    let rows: Vec<Value> = all
        .iter()
        .map(|compared| {
            json!({
                "question": compared.question,
                "file-system": compared.on,
                "circumstances": compared.circumstances,
                "measured": compared.measured,
                "predicted": compared.predicted,
                "ratio": compared.ratio(),
                "wrong": compared.is_wrong(),
                "source": compared.source,
            })
        })
        .collect();
    json!({
        "measurements": rows,
        "typical-factor": typical(all),
        "wrong-beyond": WRONG_AT,
        "wrong": all.iter().filter(|compared| compared.is_wrong()).count(),
    })
}

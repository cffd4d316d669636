//! A strict reader of the text format of Prometheus, version 0.0.4, after its description: each
//! metric with HELP and TYPE before its samples, all of them together, names of the allowed
//! characters, values with escapes, histograms that add up.

use std::collections::BTreeSet;

/// A metric.
pub struct Metric {
    name: String,
    kind: String,
    pub samples: Vec<Sample>,
}

/// A sample.
pub struct Sample {
    /// Name and labels, as they are written.
    pub written: String,
    name: String,
    labels: Vec<(String, String)>,
    pub value: f64,
}

/// Reads a text.
pub fn parse(text: &str) -> Vec<Metric> {
    assert!(text.ends_with('\n'), "the last line has no end");
    let mut metrics: Vec<Metric> = Vec::new();
    let mut names = BTreeSet::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').expect(line);
            assert!(!text.is_empty() && is_name(name), "{line}");
            let kind = lines.next().unwrap().strip_prefix("# TYPE ").expect(line);
            let (typed, kind) = kind.split_once(' ').expect(line);
            assert_eq!(typed, name);
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{kind}");
            assert!(names.insert(name.to_string()), "{name} is there twice");
            metrics.push(Metric {
                name: name.to_string(),
                kind: kind.to_string(),
                samples: Vec::new(),
            });
            continue;
        }
        let metric = metrics.last_mut().expect("a metric begins with its help");
        metric.samples.push(sample(line));
    }
    metrics
}

fn is_name(name: &str) -> bool {
    let mut signs = name.chars();
    let first = signs.next();
    first.is_some_and(|sign| sign.is_ascii_alphabetic() || sign == '_')
        && signs.all(|sign| sign.is_ascii_alphanumeric() || sign == '_')
}

fn sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).expect(line);
    let (name, mut rest) = line.split_at(end);
    assert!(is_name(name), "{line}");
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").expect(line);
            assert!(is_name(label), "{line}");
            let (value, after) = quoted(after);
            labels.push((label.to_string(), value));
            match after.strip_prefix(',') {
                Some(after) => rest = after,
                None => {
                    rest = after.strip_prefix('}').expect(line);
                    break;
                }
            }
        }
    }
    let written = line[..line.len() - rest.len()].to_string();
    let value = rest.strip_prefix(' ').expect(line).parse().expect(line);
    Sample {
        written,
        name: name.to_string(),
        labels,
        value,
    }
}

/// The text up to the next quotation mark, and what follows.
fn quoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut signs = text.char_indices();
    while let Some((at, sign)) = signs.next() {
        match sign {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match signs.next().expect(text).1 {
                'n' => '\n',
                sign @ ('\\' | '"') => sign,
                other => panic!("\\{other} in {text}"),
            }),
            sign => value.push(sign),
        }
    }
    panic!("no end of {text}")
}

impl Metric {
    /// Checks what a type demands of samples.
    pub fn check(&self) {
        let mut written = BTreeSet::new();
        for sample in &self.samples {
            assert!(written.insert(&sample.written), "{}: twice", sample.written);
            let labels: BTreeSet<_> = sample.labels.iter().map(|(name, _)| name).collect();
            assert_eq!(labels.len(), sample.labels.len(), "{}", sample.written);
            assert!(sample.value.is_finite(), "{}", sample.written);
            if self.kind != "histogram" {
                assert_eq!(sample.name, self.name);
            }
            if self.kind != "gauge" {
                assert!(sample.value >= 0.0, "{}", sample.written);
            }
        }
        if self.kind == "counter" {
            assert!(self.name.ends_with("_total"), "{}", self.name);
        }
        if self.kind == "histogram" {
            self.check_histogram();
        }
    }

    fn check_histogram(&self) {
        let mut samples = self.samples.iter().peekable();
        let part = |sample: &Sample| sample.name[self.name.len()..].to_string();
        while let Some(first) = samples.peek() {
            assert!(first.name.starts_with(&self.name), "{}", first.written);
            let whose = first.labels[..first.labels.len() - 1].to_vec();
            let (mut bound, mut ended) = (f64::NEG_INFINITY, 0.0);
            while let Some(bucket) = samples.next_if(|it| part(it) == "_bucket") {
                let (le, labels) = bucket.labels.split_last().unwrap();
                assert_eq!((le.0.as_str(), labels), ("le", &whose[..]));
                let next: f64 = le.1.parse().unwrap();
                assert!(next > bound, "{}: bounds rise", bucket.written);
                assert!(bucket.value >= ended, "{}: counts rise", bucket.written);
                (bound, ended) = (next, bucket.value);
            }
            assert_eq!(bound, f64::INFINITY, "{}: the last bucket", self.name);
            let (sum, count) = (samples.next().unwrap(), samples.next().unwrap());
            assert_eq!((part(sum).as_str(), &sum.labels), ("_sum", &whose));
            assert_eq!((part(count).as_str(), &count.labels), ("_count", &whose));
            assert_eq!(count.value, ended, "{}", count.written);
        }
    }
}

/// The reader is no rubber stamp.
#[test]
fn the_reader_refuses_what_is_wrong() {
    let head = "# HELP a_total Help.\n# TYPE a_total counter\n";
    let histogram = "# HELP h Help.\n# TYPE h histogram\n";
    let accepts = |text: String| {
        let read = || parse(&text).iter().for_each(Metric::check);
        std::panic::catch_unwind(read).is_ok()
    };
    assert!(accepts(format!("{head}a_total{{x=\"q\\\"\"}} 1\n")));
    let sound = "h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 3\nh_count 2\n";
    assert!(accepts(format!("{histogram}{sound}")));
    for wrong in [
        "a_total 1\n".to_string(),
        format!("{head}a_total 1\na_total 2\n"),
        format!("{head}a_total{{x=\"}} 1\n"),
        format!("{head}a_total{{1x=\"\"}} 1\n"),
        format!("{head}a_total\n"),
        format!("{head}a_total -1\n"),
        format!("{head}b_total 1\n"),
        format!("{head}{head}"),
        format!("{histogram}{}", sound.replace("h_count 2", "h_count 1")),
        format!("{histogram}{}", sound.replace("\"1\"} 1", "\"1\"} 3")),
        format!("{histogram}{}", sound.replace("+Inf", "0.5")),
    ] {
        assert!(!accepts(wrong.clone()), "{wrong}");
    }
}

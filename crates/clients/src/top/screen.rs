//! The terminal: what is drawn, and what keys do.

use std::io;
use std::time::{Duration, Instant};

use cowslip::error::system_words;
use cowslip_console::error::CommandError;
use cowslip_console::size;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Gauge, Row, Table};

use super::sample::{Interval, JobRow, Sample};
use super::{Sort, Source, table};
use crate::ctl::printable;

/// Lines of jobs at most; the disks have the rest.
const JOB_LINES_MAX: usize = 8;

/// The state of the picture.
struct View {
    socket: String,
    sort: Sort,
    all: bool,
    is_held: bool,
    /// Disks above the first one that is shown.
    skipped: usize,
    /// Disks that have room.
    page: usize,
}

/// The effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    End,
    Redraw,
    Nothing,
}

/// Shows a daemon until the user ends that.
///
/// # Errors
/// The terminal's; the daemon has gone.
pub fn run(source: &mut Source<'_>, before: Sample) -> Result<(), CommandError> {
    let args = source.args;
    let mut view = View {
        socket: printable(&args.socket.display().to_string()),
        sort: args.sort,
        all: args.all,
        is_held: false,
        skipped: 0,
        page: 1,
    };
    let of_terminal =
        |error: io::Error| CommandError::new(format!("The terminal: {}", system_words(&error)));
    let mut terminal = ratatui::try_init().map_err(of_terminal)?;
    let ended = (|| {
        let mut before = before;
        let mut interval = Interval::between(&before, &before);
        let length = Duration::from_secs_f64(args.interval);
        let mut due = Instant::now() + length.min(Duration::from_millis(200));
        loop {
            let drawn = terminal.draw(|frame| view.draw(frame, &interval));
            drawn.map_err(of_terminal)?;
            let effect = wait(&mut view, due).map_err(of_terminal)?;
            match effect {
                Effect::End => return Ok(()),
                Effect::Redraw => continue,
                Effect::Nothing => due = Instant::now() + length,
            }
            let now = source.sample()?;
            if !view.is_held {
                interval = Interval::between(&before, &now);
            }
            before = now;
        }
    })();
    ratatui::restore();
    ended
}

/// Waits until the time is due ([`Effect::Nothing`]), or a key has an effect.
fn wait(view: &mut View, due: Instant) -> io::Result<Effect> {
    loop {
        let rest = due.saturating_duration_since(Instant::now());
        if !event::poll(rest)? {
            return Ok(Effect::Nothing);
        }
        let effect = match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => view.press(key),
            Event::Resize(..) => Effect::Redraw,
            _ => Effect::Nothing,
        };
        if effect != Effect::Nothing {
            return Ok(effect);
        }
    }
}

impl View {
    fn press(&mut self, key: KeyEvent) -> Effect {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Effect::End,
            KeyCode::Char('c') if is_control => return Effect::End,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('a') => self.all = !self.all,
            KeyCode::Char(' ') => self.is_held = !self.is_held,
            KeyCode::Down => self.skipped += 1,
            KeyCode::Up => self.skipped = self.skipped.saturating_sub(1),
            KeyCode::PageDown => self.skipped += self.page,
            KeyCode::PageUp => self.skipped = self.skipped.saturating_sub(self.page),
            KeyCode::Home => self.skipped = 0,
            _ => return Effect::Nothing,
        }
        Effect::Redraw
    }

    fn draw(&mut self, frame: &mut Frame<'_>, interval: &Interval) {
        let jobs = interval.jobs.len().min(JOB_LINES_MAX);
        let job_lines = if jobs == 0 { 0 } else { jobs + 2 };
        let [head, disks, job_table] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Min(3),
            Constraint::Length(job_lines as u16),
        ])
        .areas(frame.area());
        self.draw_disks(frame, disks, interval);
        frame.render_widget(self.head(interval), head);
        if jobs > 0 {
            draw_jobs(frame, job_table, &interval.jobs[..jobs]);
        }
    }

    fn head(&self, interval: &Interval) -> Text<'static> {
        let sum = |of: fn(&super::sample::Disk) -> f64| {
            let shown = interval.disks.iter().filter(|it| !it.exports.is_empty());
            shown.map(of).sum::<f64>()
        };
        let requests = sum(|it| it.reads.per_second + it.writes.per_second);
        let bytes = sum(|it| it.reads.bytes_per_second + it.writes.bytes_per_second);
        let exports: usize = interval.disks.iter().map(|it| it.exports.len()).sum();
        let held = if self.is_held { "  held" } else { "" };
        let first = format!(
            "{}: {} nodes, {exports} exports, {} jobs  {requests:.0} requests/s, {}/s{held}",
            self.socket,
            interval.disks.len(),
            interval.jobs.len(),
            size::human(bytes as u64),
        );
        let keys = format!(
            "by {}  q end  s order  a all nodes  space hold",
            self.sort.name()
        );
        Text::from(vec![Line::from(first).bold(), Line::from(keys).dim()])
    }

    fn draw_disks(&mut self, frame: &mut Frame<'_>, area: Rect, interval: &Interval) {
        let rows: Vec<Vec<String>> = table::shown(interval, (self.sort, self.all))
            .into_iter()
            .map(table::disk)
            .collect();
        self.page = usize::from(area.height.saturating_sub(1)).max(1);
        self.skipped = self.skipped.min(rows.len().saturating_sub(self.page));
        let rows = &rows[self.skipped..];
        frame.render_widget(columns(&table::DISKS, rows), area);
    }
}

fn columns(heads: &[(&'static str, bool)], rows: &[Vec<String>]) -> Table<'static> {
    let widths = table::widths(heads, rows);
    let cell = |text: String, is_right: bool| {
        let side = match is_right {
            true => Alignment::Right,
            false => Alignment::Left,
        };
        Cell::from(Text::from(text).alignment(side))
    };
    let head = heads
        .iter()
        .map(|(head, right)| cell((*head).to_string(), *right));
    let head = Row::new(head).style(Style::new().reversed());
    let rows = rows.iter().map(|row| {
        let cells = row.iter().zip(heads);
        Row::new(cells.map(|(text, (_, right))| cell(text.clone(), *right)))
    });
    let widths = widths
        .into_iter()
        .map(|width| Constraint::Length(width as u16));
    Table::new(rows, widths).header(head).column_spacing(2)
}

/// The jobs, each with a bar of its progress.
fn draw_jobs(frame: &mut Frame<'_>, area: Rect, jobs: &[JobRow]) {
    let rows: Vec<Vec<String>> = jobs.iter().map(table::job).collect();
    let widths = table::widths(&table::JOBS, &rows);
    let width = widths.iter().sum::<usize>() + 2 * (widths.len() - 1);
    let [_, area] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
    let [texts, bars] =
        Layout::horizontal([Constraint::Length(width as u16 + 2), Constraint::Min(0)]).areas(area);
    frame.render_widget(columns(&table::JOBS, &rows), texts);
    for (at, job) in jobs.iter().enumerate() {
        let line = Rect {
            y: bars.y + 1 + at as u16,
            height: 1,
            ..bars
        };
        let bar = Gauge::default()
            .ratio(table::part_done(job))
            .label("")
            .use_unicode(true);
        frame.render_widget(bar, line.intersection(frame.area()));
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::sample::Disk;
    use super::super::sample::tests::interval;
    use super::*;

    fn view() -> View {
        View {
            socket: "/run/s".to_string(),
            sort: Sort::Name,
            all: false,
            is_held: false,
            skipped: 0,
            page: 1,
        }
    }

    /// The lines of a terminal.
    fn drawn(view: &mut View, (width, height): (u16, u16), interval: &Interval) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame, interval)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let rows = buffer.content.chunks(usize::from(width));
        let line = |cells: &[ratatui::buffer::Cell]| {
            let text: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
            text.trim_end().to_string()
        };
        rows.map(line).collect()
    }

    #[test]
    fn disks_and_jobs_are_drawn() {
        let lines = drawn(&mut view(), (120, 10), &interval());
        assert_eq!(
            lines[0],
            "/run/s: 2 nodes, 2 exports, 1 jobs  100 requests/s, 400 KiB/s"
        );
        assert!(lines[1].starts_with("by name  q end"), "{lines:?}");
        assert!(lines[2].starts_with("DISK  NODE  READ/s"), "{lines:?}");
        assert!(lines[3].starts_with("d,e   a        100  400 KiB  20 us"));
        assert!(
            lines[8].starts_with("JOB  TYPE    STATUS   DONE"),
            "{lines:?}"
        );
        let job = "j    mirror  running  30 %  100 MiB   10 MiB   7 s";
        assert!(lines[9].starts_with(job), "{lines:?}");
        // 30 % of the columns that are left.
        let bar = lines[9].chars().filter(|sign| *sign == '█').count();
        let room = 120 - job.len() - 2;
        assert_eq!(bar, room * 30 / 100, "{lines:?}");
    }

    #[test]
    fn a_terminal_of_any_size_is_drawn() {
        let mut interval = interval();
        interval.jobs = vec![interval.jobs[0].clone(); 20];
        for size in [(1, 1), (3, 2), (10, 5), (20, 40), (300, 3)] {
            drawn(&mut view(), size, &interval);
        }
    }

    #[test]
    fn keys_scroll_to_the_last_page_and_no_further() {
        let mut interval = interval();
        interval.jobs.clear();
        let disk = |at: usize| Disk {
            node: format!("n{at:02}"),
            exports: vec!["e".to_string()],
            ..Disk::default()
        };
        interval.disks = (0..20).map(disk).collect();
        let mut view = view();
        let first = |view: &mut View| {
            let lines = drawn(view, (100, 8), &interval);
            lines[3].split_whitespace().nth(1).unwrap().to_string()
        };
        assert_eq!(first(&mut view), "n00");
        let press = |view: &mut View, code: KeyCode| {
            assert_eq!(view.press(KeyEvent::from(code)), Effect::Redraw);
            first(view)
        };
        assert_eq!(press(&mut view, KeyCode::Down), "n01");
        assert_eq!(press(&mut view, KeyCode::PageDown), "n06");
        for _ in 0..9 {
            press(&mut view, KeyCode::PageDown);
        }
        assert_eq!(press(&mut view, KeyCode::Down), "n15");
        assert_eq!(press(&mut view, KeyCode::Up), "n14");
        assert_eq!(press(&mut view, KeyCode::Home), "n00");
    }

    #[test]
    fn keys_end_and_change_the_order() {
        let mut view = view();
        assert_eq!(view.press(KeyEvent::from(KeyCode::Char('q'))), Effect::End);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(view.press(interrupt), Effect::End);
        assert_eq!(
            view.press(KeyEvent::from(KeyCode::Char('c'))),
            Effect::Nothing
        );
        for expected in [Sort::Requests, Sort::Bytes, Sort::Latency, Sort::Name] {
            view.press(KeyEvent::from(KeyCode::Char('s')));
            assert_eq!(view.sort, expected);
        }
        view.press(KeyEvent::from(KeyCode::Char('a')));
        assert!(view.all);
    }
}

//! The picture as SVG, light and dark as the reader has it, and as lines of a terminal. Pure.

use cowslip_console::size;

use crate::draw::{Cell, Picture, SHADES};

/// Cells in a row of the SVG.
pub const COLUMNS: usize = 128;
/// Rows of each half: 2048 cells.
const ROWS: usize = 16;
/// Cells of a half.
pub const CELLS: usize = COLUMNS * ROWS;
const CELL_WIDTH: usize = 8;
const CELL_HEIGHT: usize = 12;
const MARGIN: usize = 24;
const HALF_HEIGHT: usize = ROWS * CELL_HEIGHT;
const ABOVE_TOP: usize = 76;
const BELOW_TOP: usize = ABOVE_TOP + HALF_HEIGHT + 44;
const LEGEND_TOP: usize = BELOW_TOP + HALF_HEIGHT + 24;
const WIDTH: usize = COLUMNS * CELL_WIDTH + 2 * MARGIN;
const HEIGHT: usize = LEGEND_TOP + 76;

/// Cells in a row of the terminal.
pub const TERMINAL_COLUMNS: usize = 64;
/// Rows of each half there.
const TERMINAL_ROWS: usize = 6;
/// Cells of a half there.
pub const TERMINAL_CELLS: usize = TERMINAL_COLUMNS * TERMINAL_ROWS;

/// Caption above the picture.
#[derive(Clone, Debug)]
pub struct Caption {
    /// The file's name.
    pub name: String,
    /// `guest` or `file`: whose order is above.
    pub order: &'static str,
    /// A line of figures.
    pub figures: String,
    /// The map also has metadata of an image, which gets a colour of its own.
    pub is_image: bool,
}

/// The colours of the shades: hues from blue over green to red, as bright on white as on black.
fn hue(shade: usize) -> (u8, u8, u8) {
    let degrees = 225.0 - 225.0 * shade as f64 / (SHADES - 1) as f64;
    let (saturation, lightness) = (0.62, 0.52);
    let chroma = (1.0 - (2.0 * lightness - 1.0_f64).abs()) * saturation;
    let sector = degrees / 60.0;
    let second = chroma * (1.0 - (sector % 2.0 - 1.0).abs());
    let (r, g, b) = match sector as u32 {
        0 => (chroma, second, 0.0),
        1 => (second, chroma, 0.0),
        2 => (0.0, chroma, second),
        _ => (0.0, second, chroma),
    };
    let base = lightness - chroma / 2.0;
    let byte = |part: f64| ((part + base) * 255.0).round() as u8;
    (byte(r), byte(g), byte(b))
}

/// The class of a cell in the style sheet.
fn class(cell: Cell) -> String {
    match cell {
        Cell::Empty => "e".to_string(),
        Cell::Data(shade) => format!("s{shade}"),
        Cell::Unwritten(shade) => format!("s{shade} u"),
        Cell::Metadata => "m".to_string(),
        Cell::Unplaced => "n".to_string(),
        Cell::Other => "o".to_string(),
    }
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let text = text.replace('>', "&gt;").replace('"', "&quot;");
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Classes and their colours on light and on dark ground. Without variables, which not all viewers
/// know.
const COLOURS: [(&str, &str, &str); 7] = [
    ("text", "#1b1f24", "#e6edf3"),
    (".d", "#57606a", "#9aa4af"),
    (".b", "#ffffff", "#0d1117"),
    (".e", "#e9ecef", "#1c222a"),
    (".o", "#b4bac2", "#4d5661"),
    (".m", "#1b1f24", "#f5f7fa"),
    (".n", "#d63384", "#ff7eb6"),
];

fn style() -> String {
    let mut style = String::from(
        "text{font:13px system-ui,sans-serif}.t{font-size:17px;font-weight:600}.u{opacity:.4}\n",
    );
    let mut dark = String::new();
    for (class, on_light, on_dark) in COLOURS {
        style += &format!("{class}{{fill:{on_light}}}");
        dark += &format!("{class}{{fill:{on_dark}}}");
    }
    for shade in 0..SHADES {
        let (r, g, b) = hue(shade);
        style += &format!(".s{shade}{{fill:#{r:02x}{g:02x}{b:02x}}}");
    }
    style + "\n@media(prefers-color-scheme:dark){" + &dark + "}\n"
}

/// Rows of cells, neighbours that look alike in one rectangle.
fn half(cells: &[Cell], top: usize, out: &mut String) {
    for (row, cells) in cells.chunks(COLUMNS).enumerate() {
        let mut column = 0;
        for alike in cells.chunk_by(|a, b| a == b) {
            let x = MARGIN + column * CELL_WIDTH;
            let y = top + row * CELL_HEIGHT;
            let width = alike.len() * CELL_WIDTH;
            let height = CELL_HEIGHT - 1;
            let class = class(alike[0]);
            *out += &format!(
                "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>\n"
            );
            column += alike.len();
        }
    }
}

/// The picture as an SVG document.
pub fn svg(picture: &Picture, caption: &Caption) -> String {
    let name = escaped(&caption.name);
    let order = caption.order;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\" aria-label=\"Block map of {name}\">\n\
         <title>Block map of {name}</title>\n<style>{}</style>\n\
         <rect class=\"b\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        style()
    );
    let mut text = |class: &str, x: usize, y: usize, words: &str| {
        out += &format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{words}</text>\n");
    };
    text("t", MARGIN, 28, &name);
    text("d", MARGIN, 48, &escaped(&caption.figures));
    let above = format!(
        "In the {order}'s order: {}; the colour is the place on the device",
        size::human(picture.above_bytes)
    );
    text("", MARGIN, ABOVE_TOP - 8, &above);
    let below = format!(
        "In the device's order, {} from {:#x} on, wide gaps narrowed; the colour is the place in the {order}'s order",
        size::human(picture.device.1 - picture.device.0),
        picture.device.0
    );
    text("", MARGIN, BELOW_TOP - 8, &below);
    half(&picture.above, ABOVE_TOP, &mut out);
    half(&picture.below, BELOW_TOP, &mut out);
    legend(caption, &mut out);
    out += "</svg>\n";
    out
}

fn legend(caption: &Caption, out: &mut String) {
    let top = LEGEND_TOP;
    *out += &format!("<text x=\"{MARGIN}\" y=\"{}\">first</text>\n", top + 12);
    for shade in 0..SHADES {
        let x = MARGIN + 40 + shade * 14;
        *out += &format!(
            "<rect class=\"s{shade}\" x=\"{x}\" y=\"{top}\" width=\"14\" height=\"14\"/>\n"
        );
    }
    let x = MARGIN + 48 + SHADES * 14;
    *out += &format!("<text x=\"{x}\" y=\"{}\">last</text>\n", top + 12);
    let mut keys = vec![
        ("e", "hole, or none of the named files"),
        ("s5 u", "unwritten, zeroes"),
        ("n", "no place yet, or inline"),
        ("o", "another named file"),
    ];
    if caption.is_image {
        keys.insert(0, ("m", "metadata of the image"));
    }
    let top = LEGEND_TOP + 30;
    let mut x = MARGIN;
    for (class, words) in keys {
        let (text_x, text_y) = (x + 20, top + 12);
        *out += &format!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{top}\" width=\"14\" height=\"14\"/>\
             <text x=\"{text_x}\" y=\"{text_y}\">{words}</text>\n"
        );
        x += 44 + words.len() * 7;
    }
}

/// How a terminal shows cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// Characters alone.
    Plain,
    /// Blocks in 256 colours.
    Colours,
}

/// The nearest of the 6 x 6 x 6 colours of a terminal.
fn terminal_colour((r, g, b): (u8, u8, u8)) -> u8 {
    let step = |part: u8| (u16::from(part) * 5 + 127) / 255;
    (16 + 36 * step(r) + 6 * step(g) + step(b)) as u8
}

fn character(cell: Cell) -> char {
    let digit = |shade: u8| char::from_digit(u32::from(shade), SHADES as u32).unwrap_or('?');
    match cell {
        Cell::Empty => '.',
        Cell::Data(shade) => digit(shade),
        Cell::Unwritten(_) => '~',
        Cell::Metadata => 'M',
        Cell::Unplaced => '?',
        Cell::Other => 'x',
    }
}

fn terminal_half(cells: &[Cell], ink: Ink, out: &mut String) {
    for row in cells.chunks(TERMINAL_COLUMNS) {
        *out += "  ";
        for alike in row.chunk_by(|a, b| a == b) {
            let shade = match alike[0] {
                Cell::Data(shade) | Cell::Unwritten(shade) => Some(usize::from(shade)),
                Cell::Empty | Cell::Metadata | Cell::Unplaced | Cell::Other => None,
            };
            let drawn = match (alike[0], ink) {
                (Cell::Data(_), Ink::Colours) => '█',
                (Cell::Unwritten(_), Ink::Colours) => '░',
                (Cell::Other, Ink::Colours) => '▒',
                (cell, _) => character(cell),
            };
            let drawn: String = std::iter::repeat_n(drawn, alike.len()).collect();
            match (shade, ink) {
                (Some(shade), Ink::Colours) => {
                    let colour = terminal_colour(hue(shade));
                    *out += &format!("\x1b[38;5;{colour}m{drawn}\x1b[0m");
                }
                _ => *out += &drawn,
            }
        }
        *out += "\n";
    }
}

/// The picture for a terminal.
pub fn terminal(picture: &Picture, caption: &Caption, ink: Ink) -> String {
    let order = caption.order;
    let mark = match ink {
        Ink::Plain => "0 to f",
        Ink::Colours => "the colour, blue to red,",
    };
    let mut out = format!("  in the {order}'s order ({mark} is the place on the device):\n");
    terminal_half(&picture.above, ink, &mut out);
    out += &format!("  in the device's order ({mark} is the place in the {order}'s order):\n");
    terminal_half(&picture.below, ink, &mut out);
    out += match (ink, caption.is_image) {
        (Ink::Plain, true) => {
            "  . hole or not named  ~ unwritten  M metadata  ? no place  x other file\n"
        }
        (Ink::Plain, false) => "  . hole or not named  ~ unwritten  ? no place  x other file\n",
        (Ink::Colours, true) => {
            "  . hole or not named  ░ unwritten  M metadata  ? no place  ▒ other file\n"
        }
        (Ink::Colours, false) => "  . hole or not named  ░ unwritten  ? no place  ▒ other file\n",
    };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        let mut above = vec![Cell::Empty; CELLS];
        above[..200].fill(Cell::Data(3));
        above[300] = Cell::Unwritten(9);
        let mut below: Vec<Cell> = (0..CELLS).map(|i| Cell::Data((i % SHADES) as u8)).collect();
        below[0] = Cell::Metadata;
        below[1] = Cell::Other;
        Picture {
            above,
            below,
            above_bytes: 1 << 30,
            below_bytes: 1 << 20,
            device: (0, 1 << 40),
        }
    }

    fn caption() -> Caption {
        Caption {
            name: "<a & \"b\">\n.qcow2".to_string(),
            order: "guest",
            figures: "3 runs".to_string(),
            is_image: true,
        }
    }

    /// Elements that are opened are closed, and names cannot break out.
    #[test]
    fn the_document_is_well_formed_and_bounded() {
        let text = svg(&picture(), &caption());
        let mut open: Vec<&str> = Vec::new();
        for tag in text.split('<').skip(1) {
            let tag = tag.split('>').next().unwrap();
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split([' ', '\n']).next().unwrap());
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(text.contains("&lt;a &amp; &quot;b&quot;&gt;"));
        let rects = text.matches("<rect").count();
        assert!(rects < 2 * CELLS + SHADES + 10, "{rects}");
        assert!(text.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn cells_that_look_alike_are_one_rectangle() {
        let mut out = String::new();
        half(&[Cell::Empty; CELLS], 0, &mut out);
        assert_eq!(out.matches("<rect").count(), ROWS);
    }

    #[test]
    fn shades_differ_also_in_a_terminal() {
        let colours: Vec<_> = (0..SHADES).map(hue).collect();
        for (a, b) in colours.iter().zip(&colours[1..]) {
            assert_ne!(a, b);
        }
        let mut terminal: Vec<u8> = colours.into_iter().map(terminal_colour).collect();
        terminal.dedup();
        assert!(terminal.len() >= 8, "{terminal:?}");
    }

    #[test]
    fn plain_terminals_get_characters_alone() {
        let mut small = picture();
        small.above.truncate(TERMINAL_CELLS);
        small.below.truncate(TERMINAL_CELLS);
        let text = terminal(&small, &caption(), Ink::Plain);
        assert!(text.is_ascii(), "{text}");
        assert!(text.contains("Mx23456789abcdef0"), "{text}");
        assert!(terminal(&small, &caption(), Ink::Colours).contains("\x1b[38;5;"));
    }
}

//! Tables of text, printed row by row while they are measured. Widths are therefore chosen before
//! the rows are known; where a field needs more, its column is wider from then on.

/// Where a column's fields stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Names.
    Left,
    /// Numbers.
    Right,
}

/// A column: its title, its width so far, its side.
pub type TextColumn = (String, usize, Side);

/// The columns of a table.
#[derive(Clone, Debug, Default)]
pub struct TextColumns {
    columns: Vec<TextColumn>,
    is_titled: bool,
}

impl TextColumns {
    /// Adds a column of names, wide enough for all that may come.
    #[must_use]
    pub fn names(mut self, title: &str, names: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let lengths = names.into_iter().map(|name| name.as_ref().chars().count());
        self.push(title, lengths.max().unwrap_or(0), Side::Left);
        self
    }

    /// Adds columns of numbers of these usual widths.
    #[must_use]
    pub fn numbers<'a>(mut self, columns: impl IntoIterator<Item = (&'a str, usize)>) -> Self {
        for (title, width) in columns {
            self.push(title, width, Side::Right);
        }
        self
    }

    /// Adds a column; the titles are printed again if they were printed before.
    pub fn push(&mut self, title: &str, width: usize, side: Side) {
        let width = width.max(title.chars().count());
        self.columns.push((title.to_string(), width, side));
        self.is_titled = false;
    }

    /// The line of a row, below the titles if these are new.
    pub fn row(&mut self, fields: &[String]) -> String {
        let mut text = String::new();
        if !self.is_titled {
            self.is_titled = true;
            let titles: Vec<String> = self.columns.iter().map(|c| c.0.clone()).collect();
            text = self.line(&titles);
        }
        text + &self.line(fields)
    }

    /// Width of the columns before this one, with their gaps.
    pub fn offset(&self, column: usize) -> usize {
        let before = self.columns.iter().take(column);
        before.map(|(_, width, _)| width + 2).sum()
    }

    fn line(&mut self, fields: &[String]) -> String {
        let mut line = String::new();
        for (field, (_, width, side)) in fields.iter().zip(&mut self.columns) {
            *width = (*width).max(field.chars().count());
            line += &match side {
                Side::Left => format!("{field:<width$}  "),
                Side::Right => format!("{field:>width$}  "),
            };
        }
        line.truncate(line.trim_end().len());
        line + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_stand_under_their_titles_and_widen_their_columns() {
        let fields = |fields: [&str; 3]| fields.map(str::to_string);
        let mut columns = TextColumns::default()
            .names("fs", ["ext4", "xfs"])
            .numbers([("IOPS", 6)]);
        columns.push("calls", 0, Side::Left);
        let text = columns.row(&fields(["ext4", "12", "1 mmap"]));
        assert_eq!(text, "fs      IOPS  calls\next4      12  1 mmap\n");
        let text = columns.row(&fields(["xfs", "1234567", ""]));
        assert_eq!(text, "xfs   1234567\n");
        assert_eq!(columns.offset(2), 15);
        columns.push("more", 0, Side::Right);
        let text = columns.row(&fields(["xfs", "3", "none"]));
        assert_eq!(text.lines().count(), 2);
        assert!(text.starts_with("fs       IOPS  calls   more\n"), "{text}");
    }
}

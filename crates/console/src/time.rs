//! Dates for people.

use chrono::{DateTime, Local, TimeZone, Utc};

/// Formats seconds since 1970 in the machine's time zone (`TZ`, else that of the system), as
/// `2026-11-21 21:18:45`: for what people have done, as in `ls -l`.
pub fn local_date_and_time(seconds: u64) -> String {
    formatted(&Local, seconds)
}

/// Formats seconds since 1970 in UTC, as `2026-11-21 21:18:45`: for logs, which are compared with
/// those of other machines.
pub fn date_and_time(seconds: u64) -> String {
    formatted(&Utc, seconds)
}

fn formatted<Z: TimeZone>(zone: &Z, seconds: u64) -> String {
    let date = i64::try_from(seconds).ok();
    let date = date.and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    match date {
        Some(date) => {
            let date = date.with_timezone(zone).naive_local();
            date.format("%Y-%m-%d %H:%M:%S").to_string()
        }
        // From a file that says anything: no year has so long a number.
        None => format!("{seconds} s after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use chrono::FixedOffset;

    use super::*;

    #[test]
    fn known_seconds_have_known_dates() {
        let cases = [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (951_868_799, "2000-02-29 23:59:59"),
            (951_868_800, "2000-03-01 00:00:00"),
            (1_795_295_925, "2026-11-21 21:18:45"),
            (4_294_967_295, "2106-02-07 06:28:15"),
            (u64::MAX, "18446744073709551615 s after 1970"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(date_and_time(seconds), expected);
        }
    }

    #[test]
    fn a_zone_moves_the_clock() {
        let zone = FixedOffset::east_opt(5 * 3600 + 1800).unwrap();
        assert_eq!(formatted(&zone, 951_868_799), "2000-03-01 05:29:59");
        let shown = DateTime::from_timestamp(951_868_799, 0).unwrap();
        let shown = shown.with_timezone(&Local).format("%F %T").to_string();
        assert_eq!(local_date_and_time(951_868_799), shown);
    }
}

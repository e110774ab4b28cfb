//! Cron schedules: five fields, lists, ranges, steps and names, as `robfig/cron` reads them (which is what users test with).

use jiff::{SignedDuration, Timestamp, Unit, Zoned, civil, tz::TimeZone};

/// Years ahead in which a schedule must come to pass at least once.
const HORIZON_YEARS: i64 = 5;

/// When something is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Schedule {
    Fields { minutes: Field, hours: Field, days: Field, months: Field, weekdays: Field },
    /// `@every 1h30m`.
    Every(SignedDuration),
}

/// The set of values of one field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    bits: u64,
    /// Written as `*`: says nothing about the day.
    star: bool,
}

impl Field {
    fn has(self, value: i8) -> bool {
        u8::try_from(value).is_ok_and(|value| self.bits >> value & 1 == 1)
    }
}

const MONTHS: [&str; 12] = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const WEEKDAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

fn number(text: &str, names: &[&str], first: u64) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    if let Some(index) = names.iter().position(|name| *name == lower) {
        return Ok(index as u64 + first);
    }
    text.parse().map_err(|_| format!("failed to parse int from {text:?}"))
}

fn part(text: &str, min: u64, max: u64, names: &[&str], first: u64) -> Result<Field, String> {
    let (range, step) = match text.split_once('/') {
        Some((range, step)) => (range, Some(step.parse::<u64>().map_err(|_| format!("failed to parse int from {step:?}"))?)),
        None => (text, None),
    };
    let is_star = range == "*" || range == "?";
    let (low, high) = match range.split_once('-') {
        _ if is_star => (min, max),
        Some((low, high)) => (number(low, names, first)?, number(high, names, first)?),
        None => {
            let value = number(range, names, first)?;
            // `5/15` means from 5 on.
            (value, if step.is_some() { max } else { value })
        }
    };
    if low < min || high > max {
        return Err(format!("value of {text:?} is outside of {min}-{max}"));
    }
    if low > high {
        return Err(format!("beginning of range {text:?} is beyond its end"));
    }
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(format!("step of range {text:?} should be a positive number"));
    }
    let bits = (low..=high).step_by(step as usize).fold(0, |bits, value| bits | 1 << value);
    Ok(Field { bits, star: is_star && step == 1 })
}

fn field(text: &str, min: u64, max: u64, names: &[&str], first: u64) -> Result<Field, String> {
    let mut all = Field { bits: 0, star: false };
    for one in text.split(',').filter(|one| !one.is_empty()) {
        let one = part(one, min, max, names, first)?;
        all = Field { bits: all.bits | one.bits, star: all.star || one.star };
    }
    if all.bits == 0 { Err(format!("field {text:?} is empty")) } else { Ok(all) }
}

impl Schedule {
    /// Parses `*/5 * * * *`, `@daily`, `@every 1h`.
    ///
    /// # Errors
    /// What cannot be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(every) = text.strip_prefix("@every ") {
            let every: SignedDuration = every.trim().parse().map_err(|error| format!("failed to parse duration {text:?}: {error}"))?;
            return if every >= SignedDuration::from_secs(1) { Ok(Schedule::Every(every)) } else { Err(format!("{text:?} is shorter than a second")) };
        }
        let expanded = match text {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            _ if text.starts_with('@') => return Err(format!("unrecognized descriptor: {text}")),
            _ => text,
        };
        let fields: Vec<&str> = expanded.split_whitespace().collect();
        let [minutes, hours, days, months, weekdays] = fields.as_slice() else {
            return Err(format!("expected exactly 5 fields, found {}: {text:?}", fields.len()));
        };
        Ok(Schedule::Fields {
            minutes: field(minutes, 0, 59, &[], 0)?,
            hours: field(hours, 0, 23, &[], 0)?,
            days: field(days, 1, 31, &[], 0)?,
            months: field(months, 1, 12, &MONTHS, 1)?,
            weekdays: field(weekdays, 0, 6, &WEEKDAYS, 0)?,
        })
    }

    /// The first time after `after` in a time zone; none if there is none within five years.
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match self {
            Schedule::Every(every) => {
                let whole = Timestamp::from_second(after.as_second()).ok()?;
                whole.checked_add(*every).ok()
            }
            Schedule::Fields { .. } => self.next_in(&after.to_zoned(zone.clone())),
        }
    }

    fn day_matches(&self, date: civil::Date) -> bool {
        let Schedule::Fields { days, weekdays, .. } = self else { return false };
        let day = days.has(date.day());
        let weekday = weekdays.has(date.weekday().to_sunday_zero_offset());
        if days.star || weekdays.star { day && weekday } else { day || weekday }
    }

    fn next_in(&self, after: &Zoned) -> Option<Timestamp> {
        let Schedule::Fields { minutes, hours, months, .. } = self else { return None };
        let horizon = after.date().checked_add(jiff::Span::new().years(HORIZON_YEARS)).ok()?;
        let minute = SignedDuration::from_mins(1);
        let truncated = Timestamp::from_second(after.timestamp().as_second().div_euclid(60) * 60).ok()?;
        let mut at = truncated.checked_add(minute).ok()?.to_zoned(after.time_zone().clone());
        while at.date() <= horizon {
            if !months.has(at.month()) {
                let first = at.date().first_of_month().checked_add(jiff::Span::new().months(1)).ok()?;
                at = first.to_zoned(at.time_zone().clone()).ok()?;
            } else if !self.day_matches(at.date()) {
                at = at.date().tomorrow().ok()?.to_zoned(at.time_zone().clone()).ok()?;
            } else if !hours.has(at.hour()) {
                // In absolute time, so that an hour that the clocks skip or repeat is passed once.
                let left = SignedDuration::from_mins(60 - i64::from(at.minute()));
                at = at.timestamp().checked_add(left).ok()?.to_zoned(at.time_zone().clone());
            } else if !minutes.has(at.minute()) {
                at = at.timestamp().checked_add(minute).ok()?.to_zoned(at.time_zone().clone());
            } else {
                return at.round(Unit::Minute).ok().map(|at| at.timestamp());
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: &str, zone: &str, after: &str, expected: &str) {
        let zone = TimeZone::get(zone).expect(zone);
        let after: Timestamp = after.parse().expect(after);
        let next = Schedule::parse(schedule).expect(schedule).next(after, &zone);
        assert_eq!(next.map(|next| next.to_string()).as_deref(), Some(expected), "{schedule}");
    }

    #[test]
    fn next_times() {
        check("* * * * *", "UTC", "2026-01-01T00:00:30Z", "2026-01-01T00:01:00Z");
        check("*/15 * * * *", "UTC", "2026-01-01T00:15:00Z", "2026-01-01T00:30:00Z");
        check("0 12 * * MON-FRI", "UTC", "2026-01-02T12:00:00Z", "2026-01-05T12:00:00Z");
        check("0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z");
        // both days given: either will do
        check("0 0 13 * 5", "UTC", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        check("@hourly", "UTC", "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z");
        check("@every 90m", "UTC", "2026-01-01T00:00:00.5Z", "2026-01-01T01:30:00Z");
        check("30 9 * * *", "Europe/Berlin", "2026-01-01T00:00:00Z", "2026-01-01T08:30:00Z");
        check("30 9 * * *", "Europe/Berlin", "2026-07-01T00:00:00Z", "2026-07-01T07:30:00Z");
        // 02:30 does not exist on that day
        check("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", "2026-03-30T00:30:00Z");
        check("0 0 1,15 JAN,dec ?", "UTC", "2026-01-02T00:00:00Z", "2026-01-15T00:00:00Z");
    }

    #[test]
    fn what_is_refused() {
        for text in ["", "* * * *", "60 * * * *", "5-1 * * * *", "*/0 * * * *", "@never", "x * * * *", "@every 1ms"] {
            assert!(Schedule::parse(text).is_err(), "{text:?}");
        }
        let never = Schedule::parse("0 0 31 2 *").expect("a schedule");
        assert_eq!(never.next(Timestamp::UNIX_EPOCH, &TimeZone::UTC), None);
    }
}

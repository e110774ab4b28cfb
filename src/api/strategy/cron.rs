//! Cron schedules as upstream's library (`robfig/cron`) reads them: five fields, month and day names, `@every` and the
//! usual nicknames. `0` and `7` are not both Sunday: days of the week are 0 to 6.

/// What a schedule is made of: one bit per allowed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Five fields.
    Fields {
        /// Minutes 0 to 59.
        minute: u64,
        /// Hours 0 to 23.
        hour: u64,
        /// Days of the month 1 to 31.
        day: u64,
        /// Months 1 to 12.
        month: u64,
        /// Days of the week, 0 is Sunday.
        weekday: u64,
        /// The day of the month was `*` or `?`.
        any_day: bool,
        /// The day of the week was `*` or `?`.
        any_weekday: bool,
    },
    /// `@every`: seconds between runs.
    Every(u64),
}

const MONTHS: [&str; 12] = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

/// Parses a schedule; the error says what is wrong with it. A leading `TZ=` is for the caller to take off.
pub fn parse(text: &str) -> Result<Schedule, String> {
    if text.is_empty() {
        return Err("empty spec string".into());
    }
    if text.starts_with('@') {
        return nickname(text);
    }
    let fields: Vec<&str> = text.split_whitespace().collect();
    let [minute, hour, day, month, weekday] = fields.as_slice() else {
        return Err(format!("expected exactly 5 fields, found {}: [{}]", fields.len(), fields.join(" ")));
    };
    let any = |f: &str| f.split(',').any(|p| p == "*" || p == "?" || p == "*/1");
    Ok(Schedule::Fields {
        minute: field(minute, 0, 59, &[], 0)?,
        hour: field(hour, 0, 23, &[], 0)?,
        day: field(day, 1, 31, &[], 0)?,
        month: field(month, 1, 12, &MONTHS, 1)?,
        weekday: field(weekday, 0, 6, &DAYS, 0)?,
        any_day: any(day),
        any_weekday: any(weekday),
    })
}

fn nickname(text: &str) -> Result<Schedule, String> {
    if let Some(every) = text.strip_prefix("@every ") {
        return duration(every)
            .map(|s| Schedule::Every(s.max(1)))
            .ok_or_else(|| format!("failed to parse duration {text}"));
    }
    parse(match text {
        "@yearly" | "@annually" => "0 0 1 1 *",
        "@monthly" => "0 0 1 * *",
        "@weekly" => "0 0 * * 0",
        "@daily" | "@midnight" => "0 0 * * *",
        "@hourly" => "0 * * * *",
        _ => return Err(format!("unrecognized descriptor: {text}")),
    })
}

/// `1h30m10s` in seconds.
fn duration(text: &str) -> Option<u64> {
    let mut total = 0u64;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let n: u64 = rest[..end].parse().ok()?;
        let (unit, len) = match &rest[end..] {
            r if r.starts_with("ms") || r.starts_with("us") || r.starts_with("ns") => (0, 2),
            r if r.starts_with('h') => (3600, 1),
            r if r.starts_with('m') => (60, 1),
            r if r.starts_with('s') => (1, 1),
            _ => return None,
        };
        total = total.checked_add(n.checked_mul(unit)?)?;
        rest = &rest[end + len..];
    }
    Some(total)
}

fn field(text: &str, min: u32, max: u32, names: &[&str], base: u32) -> Result<u64, String> {
    let mut bits = 0;
    for part in text.split(',') {
        bits |= range(part, min, max, names, base)?;
    }
    Ok(bits)
}

fn value(text: &str, names: &[&str], base: u32) -> Result<u32, String> {
    let lower = text.to_lowercase();
    if let Some(i) = names.iter().position(|n| *n == lower) {
        return Ok(i as u32 + base);
    }
    match text.parse::<u32>() {
        Ok(n) => Ok(n),
        Err(_) => Err(format!("failed to parse int from {text}: strconv.Atoi: parsing {text:?}: invalid syntax")),
    }
}

fn range(part: &str, min: u32, max: u32, names: &[&str], base: u32) -> Result<u64, String> {
    let (span, step) = match part.split_once('/') {
        None => (part, None),
        Some((_, s)) if s.contains('/') => return Err(format!("too many slashes: {part}")),
        Some((span, s)) => (span, Some(value(s, &[], 0)?)),
    };
    let (start, end) = match span {
        "*" | "?" => (min, max),
        _ => match span.split_once('-') {
            None => {
                let n = value(span, names, base)?;
                (n, if step.is_some() { max } else { n })
            }
            Some((_, b)) if b.contains('-') => return Err(format!("too many hyphens: {part}")),
            Some((a, b)) => (value(a, names, base)?, value(b, names, base)?),
        },
    };
    let step = step.unwrap_or(1);
    if start < min {
        return Err(format!("beginning of range ({start}) below minimum ({min}): {part}"));
    }
    if end > max {
        return Err(format!("end of range ({end}) above maximum ({max}): {part}"));
    }
    if start > end {
        return Err(format!("beginning of range ({start}) beyond end of range ({end}): {part}"));
    }
    if step == 0 {
        return Err(format!("step of range should be a positive number: {part}"));
    }
    Ok((start..=end).step_by(step as usize).fold(0, |bits, n| bits | 1 << n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules() {
        for good in ["* * * * *", "*/5 1,2 1-31/2 jan-mar mon", "@hourly", "@every 1h30m", "0 0 ? * SUN", "59 23 31 12 6"] {
            assert!(parse(good).is_ok(), "{good}: {:?}", parse(good));
        }
        for bad in
            ["", "* * * *", "60 * * * *", "* * 0 * *", "* * * 13 *", "* * * * 7", "5-1 * * * *", "*/0 * * * *", "@often", "a * * * *"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let Ok(Schedule::Fields { minute, any_day, any_weekday, .. }) = parse("*/15 * 1 * *") else { panic!("fields") };
        assert_eq!((minute, any_day, any_weekday), (1 | 1 << 15 | 1 << 30 | 1 << 45, false, true));
    }
}

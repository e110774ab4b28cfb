//! Durations for people, `k8s.io/apimachinery/pkg/util/duration.HumanDuration`.

/// Two or three significant figures: `59s`, `3m12s`, `7h5m`, `2d3h`, `400d`, `3y2d`. Up to a second in the future is `0s`.
pub fn human(seconds: i64) -> String {
    match seconds {
        ..-1 => return "<invalid>".into(),
        -1 => return "0s".into(),
        0..120 => return format!("{seconds}s"),
        _ => {}
    }
    let two = |big: i64, b: &str, small: i64, s: &str| {
        if small == 0 { format!("{big}{b}") } else { format!("{big}{b}{small}{s}") }
    };
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    let days = hours / 24;
    if minutes < 10 {
        two(minutes, "m", seconds % 60, "s")
    } else if minutes < 180 {
        format!("{minutes}m")
    } else if hours < 8 {
        two(hours, "h", minutes % 60, "m")
    } else if hours < 48 {
        format!("{hours}h")
    } else if days < 8 {
        two(days, "d", hours % 24, "h")
    } else if days < 730 {
        format!("{days}d")
    } else if days < 2920 {
        two(days / 365, "y", days % 365, "d")
    } else {
        format!("{}y", days / 365)
    }
}

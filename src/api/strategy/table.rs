//! Which rules a resource has.

use crate::strategy::Strategy;
use crate::strategy::rules::Rules;

static PLAIN: Rules = Rules::PLAIN;

/// (group, plural, rules); a resource without a row has [`Rules::PLAIN`].
static TABLE: &[(&str, &str, &Rules)] = &[];

/// The rules of a built-in resource.
pub fn strategy_for(group: &str, resource: &str) -> &'static dyn Strategy {
    TABLE.iter().find(|(g, r, _)| *g == group && *r == resource).map_or(&PLAIN, |(_, _, rules)| *rules)
}

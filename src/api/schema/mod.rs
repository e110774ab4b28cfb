//! The schema engine: one arena of types for built-in kinds (out of the facts) and custom ones (out of CRDs).
//!
//! A [`TypeId`] is an index into a [`Schemas`]. A custom resource has an arena of its own on top of the
//! built-in one (`ObjectMeta` and friends are shared, not copied). The same walks prune, default, check,
//! validate and merge every object; what Go's decoder does to a typed object (drop nulls, drop unknown
//! fields, write quantities in canonical form) is [`Schemas::normalize`].
//!
//! All walks are bounded by [`MAX_DEPTH`], which [`decode_json`] enforces on the way in.

mod check;
mod crd;
mod decode;
mod defaults;
pub mod formats;
mod prune;
mod validate;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

pub use check::value_kind;
pub use crd::Builder;
pub use decode::{DecodeError, Decoded, decode_json};
pub use formats::parse_go_duration;

/// How deeply a document may be nested. Upstream's limit is 10,000 and a stack that grows; ours is what no
/// legitimate object comes near and a thread's stack holds many times over.
pub const MAX_DEPTH: usize = 128;

/// A type in a [`Schemas`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(pub u32);

/// What values of a type look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// An object with known fields.
    Object,
    /// An object with arbitrary keys and values of one type.
    Map(TypeId),
    /// An array.
    List(TypeId),
    /// A string.
    String,
    /// An integer.
    Integer,
    /// A number.
    Number,
    /// `true` or `false`.
    Boolean,
    /// An integer or a string.
    IntOrString,
    /// A string or number that [`crate::quantity`] reads.
    Quantity,
    /// RFC 3339, whole seconds.
    Time,
    /// RFC 3339, six digits of a second.
    MicroTime,
    /// Go's duration text, `1h2m3s`.
    Duration,
    /// Base64 text.
    Bytes,
    /// Anything: `RawExtension`, JSON, a map that preserves unknown fields.
    Any,
}

/// `x-kubernetes-list-type`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum ListType {
    /// One value, replaced as a whole.
    #[default]
    Atomic,
    /// Scalars, each at most once.
    Set,
    /// Objects told apart by these keys.
    Map(Vec<String>),
}

/// `x-kubernetes-map-type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MapType {
    /// Fields are owned one by one.
    #[default]
    Granular,
    /// One value, replaced as a whole.
    Atomic,
}

/// `x-kubernetes-patch-strategy`: strategic merge patch's directives of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct PatchStrategy {
    /// Lists are merged instead of replaced.
    pub merge: bool,
    /// `retainKeys`: keys that the patch does not name go away.
    pub retain_keys: bool,
    /// `replace`: the field is taken from the patch as a whole, where objects are merged by default.
    pub replace: bool,
}

/// A field of an object type.
#[derive(Clone, Debug)]
pub struct Field {
    /// The JSON name.
    pub name: Arc<str>,
    /// Its type.
    pub ty: TypeId,
    /// Whether the schema says that it must be there.
    pub required: bool,
    /// How a list (of lists, too: ask [`Schemas::list_type`] for inner ones) is owned.
    pub list_type: ListType,
    /// How a map or object is owned.
    pub map_type: MapType,
    /// How strategic merge patch treats it.
    pub patch_strategy: PatchStrategy,
    /// The key by which strategic merge patch matches list items.
    pub merge_key: Option<Arc<str>>,
    /// `required` covers lists and maps, too: they must not be empty (`+k8s:required`; OpenAPI's `required` of a
    /// Go list only says that it is written even when it is null).
    pub required_items: bool,
    /// May not change once it is set (`+k8s:immutable`).
    pub immutable: bool,
    /// What an absent field becomes.
    pub default: Option<Arc<Value>>,
    /// Field number in protobuf; 0 when it has none.
    pub proto: u32,
    /// How Go holds the field; decides what is written when it is empty.
    pub go: GoField,
    /// Name of the type in Go where it is a name for something plain (`v1.ResourceList`): decode errors say it.
    pub go_type: Option<Arc<str>>,
}

/// How the Go struct holds a field: what JSON and protobuf write for an empty value depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GoField {
    /// Behind a pointer: empty and absent differ.
    pub pointer: bool,
    /// An empty value is not written: `omitempty`, or of a struct `omitzero`.
    pub omit_empty: bool,
    /// Encoding of an integer in protobuf is 32 bits wide (decoding truncates).
    pub int32: bool,
}

/// A node of the arena.
#[derive(Clone, Debug)]
pub struct Type {
    /// What values look like.
    pub shape: Shape,
    /// Name of the OpenAPI definition (`io.k8s.api.core.v1.Pod`); `None` for anonymous types.
    pub name: Option<Arc<str>>,
    /// Fields of an object, sorted by name.
    pub fields: Box<[Field]>,
    /// How a list is owned.
    pub list_type: ListType,
    /// How a map or object is owned.
    pub map_type: MapType,
    /// Null is a value of its own (custom types only).
    pub nullable: bool,
    /// Unknown fields stay (custom types; built-in types that hold anything are [`Shape::Any`]).
    pub preserve_unknown: bool,
    /// A complete object with apiVersion, kind and metadata inside another.
    pub embedded: bool,
    /// A Go struct (or part of one) upstream, not a custom resource's schema: decoding drops nulls and
    /// empty values, and `required` asks for a value that is not empty.
    pub typed: bool,
    /// Whether a default hides in here or below: lets defaulting skip whole subtrees.
    pub has_defaults: bool,
    /// How protobuf holds it, where that is not what the shape suggests.
    pub special: Special,
    /// What an object value, or each item of an array value, of a [`Shape::Any`] type is (the types of a
    /// CRD's schema that are "a schema or something else").
    pub inner: Option<TypeId>,
    /// Restrictions of values, when there are any.
    pub checks: Option<Box<Checks>>,
    /// Fields that exist in protobuf only to hold fields of this type that JSON shows flat
    /// (Go's embedded structs): number and type.
    pub inline: Box<[Inline]>,
    /// Fields and inline structs in the order of their protobuf numbers: index of a field, or number of
    /// fields + index of an inline struct.
    pub wire: Box<[u16]>,
    /// Indexes of the fields that Go writes even when nobody set them: scalars without `omitempty`, and structs.
    pub always: Box<[u16]>,
}

/// How protobuf holds a type that is a thing of its own there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Special {
    /// As its shape says.
    #[default]
    None,
    /// A list that is a message with the list as its field 1 (Go's named slices: `ExtraValue`, `Verbs`).
    Wrapped,
    /// JSON text as field 1 of a message: `RawExtension`, `FieldsV1`, `JSON`.
    Raw,
    /// `JSONSchemaPropsOrArray`.
    SchemaOrArray,
    /// `JSONSchemaPropsOrBool`.
    SchemaOrBool,
    /// `JSONSchemaPropsOrStringArray`.
    SchemaOrStrings,
}

/// An embedded Go struct: its fields are this type's fields in JSON and a message of their own in protobuf.
#[derive(Clone, Copy, Debug)]
pub struct Inline {
    /// Field number of the message.
    pub proto: u32,
    /// Its type; all its fields are in the outer type as well.
    pub ty: TypeId,
    /// Behind a pointer: no message when none of its fields is set.
    pub pointer: bool,
}

/// Restrictions of values beyond their shape.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// Allowed values.
    pub enum_values: Option<Box<[Value]>>,
    /// `date-time`, `int32`, `k8s-short-name`, ...
    pub format: Option<Arc<str>>,
    /// Regular expression (custom types).
    pub pattern: Option<Box<Pattern>>,
    /// Lower bound of a number.
    pub minimum: Option<serde_json::Number>,
    /// Upper bound of a number.
    pub maximum: Option<serde_json::Number>,
    /// The lower bound itself is not allowed.
    pub exclusive_minimum: bool,
    /// The upper bound itself is not allowed.
    pub exclusive_maximum: bool,
    /// The number is a multiple of this.
    pub multiple_of: Option<f64>,
    /// Least number of characters.
    pub min_length: Option<u64>,
    /// Largest number of characters.
    pub max_length: Option<u64>,
    /// Largest number of bytes (`+k8s:maxBytes`).
    pub max_bytes: Option<u64>,
    /// Least number of items.
    pub min_items: Option<u64>,
    /// Largest number of items.
    pub max_items: Option<u64>,
    /// No two items are equal.
    pub unique_items: bool,
    /// Least number of keys.
    pub min_properties: Option<u64>,
    /// Largest number of keys.
    pub max_properties: Option<u64>,
    /// Names that must be there (of logical parts; a [`Field`] has its own flag).
    pub required: Box<[Arc<str>]>,
    /// All of these hold.
    pub all_of: Box<[Part]>,
    /// At least one of these holds.
    pub any_of: Box<[Part]>,
    /// Exactly one of these holds.
    pub one_of: Box<[Part]>,
    /// This does not hold.
    pub not: Option<Box<Part>>,
    /// Sets of fields of which at most (or exactly) one may be set (`+k8s:unionMember`).
    pub unions: Box<[Union]>,
}

/// A member set of a tagged or untagged union.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Union {
    /// The fields.
    pub members: Box<[Arc<str>]>,
    /// Whether none set is allowed, too.
    pub zero_allowed: bool,
}

/// A logical part of a schema (below allOf, anyOf, oneOf, not): checks without a structure of its own.
#[derive(Clone, Debug, Default)]
pub struct Part {
    /// JSON type, where the part repeats it (int-or-string's two parts).
    pub kind: Option<Shape>,
    /// Checks of the value itself.
    pub checks: Checks,
    /// Parts for fields.
    pub properties: Box<[(Arc<str>, Part)]>,
    /// A part for every item.
    pub items: Option<Box<Part>>,
    /// A part for every value of a map.
    pub additional: Option<Box<Part>>,
}

/// A regular expression that is compiled when it is first used: most patterns of most CRDs never are.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// As it was written.
    pub source: Arc<str>,
    compiled: std::sync::OnceLock<Option<regex::Regex>>,
}

/// An arena of types.
#[derive(Debug, Default)]
pub struct Schemas {
    base: Option<Arc<Schemas>>,
    first: u32,
    types: Vec<Type>,
    names: HashMap<Arc<str>, TypeId>,
}

// === impl Pattern ===

impl Pattern {
    /// Checks that `source` compiles within bounds.
    pub fn new(source: &str) -> Result<Self, String> {
        formats::compile(source)?;
        Ok(Pattern { source: source.into(), compiled: std::sync::OnceLock::new() })
    }

    /// Whether the pattern occurs in `text`.
    pub fn is_match(&self, text: &str) -> bool {
        let compiled = self.compiled.get_or_init(|| formats::compile(&self.source).ok());
        compiled.as_ref().is_none_or(|regex| regex.is_match(text))
    }
}

// === impl Type ===

impl Type {
    /// A type of this shape without fields or restrictions.
    pub fn new(shape: Shape) -> Self {
        Type {
            shape,
            name: None,
            fields: Box::default(),
            list_type: ListType::Atomic,
            map_type: MapType::Granular,
            nullable: false,
            preserve_unknown: false,
            embedded: false,
            typed: false,
            has_defaults: false,
            special: Special::None,
            inner: None,
            checks: None,
            inline: Box::default(),
            wire: Box::default(),
            always: Box::default(),
        }
    }

    /// Sorts fields and inline structs by protobuf number, once both are complete.
    pub fn order_wire(&mut self) {
        let fields = self.fields.iter().map(|field| field.proto);
        let inline = self.inline.iter().map(|inline| inline.proto);
        let mut wire: Vec<(u32, u16)> = fields.chain(inline).zip(0..).filter(|(proto, _)| *proto > 0).collect();
        wire.sort_unstable();
        self.wire = wire.into_iter().map(|(_, index)| index).collect();
    }

    /// The field of this name.
    pub fn field(&self, name: &str) -> Option<&Field> {
        let index = self.fields.binary_search_by(|field| (*field.name).cmp(name)).ok()?;
        Some(&self.fields[index])
    }
}

// === impl Schemas ===

impl Schemas {
    /// An empty arena on top of `base`, whose types it can refer to.
    pub fn on(base: Arc<Schemas>) -> Self {
        let first = base.first + base.types.len() as u32;
        Schemas { base: Some(base), first, types: Vec::new(), names: HashMap::new() }
    }

    /// The built-in types, loaded on first use and shared.
    pub fn builtin() -> Arc<Schemas> {
        crate::facts::schemas()
    }

    /// A type. Ids come from this arena or its base, so that there always is one.
    pub fn ty(&self, id: TypeId) -> &Type {
        match &self.base {
            Some(base) if id.0 < self.first => base.ty(id),
            _ => &self.types[(id.0 - self.first) as usize],
        }
    }

    /// What values of a type look like.
    pub fn shape(&self, id: TypeId) -> &Shape {
        &self.ty(id).shape
    }

    /// A field of an object type.
    pub fn field(&self, id: TypeId, name: &str) -> Option<&Field> {
        self.ty(id).field(name)
    }

    /// The fields of an object type, sorted by name.
    pub fn fields(&self, id: TypeId) -> impl Iterator<Item = &Field> {
        self.ty(id).fields.iter()
    }

    /// How a list type is owned, wherever it stands (as a field, an item or a map's value).
    pub fn list_type(&self, id: TypeId) -> &ListType {
        &self.ty(id).list_type
    }

    /// How a map or object type is owned, wherever it stands.
    pub fn map_type(&self, id: TypeId) -> MapType {
        self.ty(id).map_type
    }

    /// A type by the name of its OpenAPI definition, `io.k8s.api.core.v1.Pod`.
    pub fn named(&self, name: &str) -> Option<TypeId> {
        self.names.get(name).copied().or_else(|| self.base.as_ref()?.named(name))
    }

    /// Names and ids of this arena's own definitions.
    pub fn definitions(&self) -> impl Iterator<Item = (&Arc<str>, TypeId)> {
        self.names.iter().map(|(name, id)| (name, *id))
    }

    /// Adds a type.
    pub fn push(&mut self, ty: Type) -> TypeId {
        let id = TypeId(self.first + self.types.len() as u32);
        if let Some(name) = &ty.name {
            self.names.insert(name.clone(), id);
        }
        self.types.push(ty);
        id
    }

    /// A type of this arena (not of its base), to fill in what was not known when it was added.
    pub fn ty_mut(&mut self, id: TypeId) -> Option<&mut Type> {
        self.types.get_mut(id.0.checked_sub(self.first)? as usize)
    }

    /// Number of types of this arena without its base.
    pub fn len(&self) -> usize {
        self.types.len()
    }

    /// Whether the arena has no types of its own.
    pub fn is_empty(&self) -> bool {
        self.types.is_empty()
    }

    /// Frees what building over-allocated, and notes which subtrees hold defaults and which fields always appear.
    pub fn seal(&mut self) {
        for index in 0..self.types.len() {
            let ty = &self.types[index];
            if !ty.typed {
                continue;
            }
            let always = |field: &Field| {
                let written = !field.go.pointer && !field.go.omit_empty;
                written && matches!(self.ty(field.ty).shape, Shape::Object | Shape::String | Shape::Integer | Shape::Boolean | Shape::Number)
            };
            let always = (0_u16..).zip(&ty.fields).filter(|(_, field)| always(field)).map(|(index, _)| index).collect();
            self.types[index].always = always;
        }
        self.types.shrink_to_fit();
        self.names.shrink_to_fit();
        // Types may refer to each other in cycles, so iterate to the fixed point; depth bounds the rounds.
        loop {
            let mut changed = false;
            for index in 0..self.types.len() {
                if self.types[index].has_defaults {
                    continue;
                }
                let ty = &self.types[index];
                let below = |id: TypeId| self.ty(id).has_defaults;
                let has = match ty.shape {
                    Shape::Map(item) | Shape::List(item) => below(item),
                    _ => ty.fields.iter().any(|field| field.default.is_some() || below(field.ty)),
                };
                self.types[index].has_defaults = has;
                changed |= has;
            }
            if !changed {
                return;
            }
        }
    }
}

/// A path to a field, kept on the stack of the walk: text is made only when there is something to say.
#[derive(Clone, Copy)]
pub(crate) enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl std::fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Path::Root => Ok(()),
            Path::Field(Path::Root, name) => f.write_str(name),
            Path::Field(parent, name) => write!(f, "{parent}.{name}"),
            Path::Key(parent, key) => write!(f, "{parent}[{key}]"),
            Path::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

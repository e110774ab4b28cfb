//! The wire format: varints, tags, lengths.

use super::Error;

/// Writes a varint.
pub(crate) fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Writes a field's tag.
pub(crate) fn key(out: &mut Vec<u8>, number: u32, wire: u8) {
    varint(out, u64::from(number) << 3 | u64::from(wire));
}

/// Writes a field of bytes or text.
pub(crate) fn bytes_field(out: &mut Vec<u8>, number: u32, bytes: &[u8]) {
    key(out, number, 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Writes a field that is a message: one byte is left for its length and the message moved when it needs more.
pub(crate) fn nested(out: &mut Vec<u8>, number: u32, write: impl FnOnce(&mut Vec<u8>) -> Result<(), Error>) -> Result<(), Error> {
    key(out, number, 2);
    let start = out.len();
    out.push(0);
    write(out)?;
    let length = out.len() - start - 1;
    if length < 0x80 {
        out[start] = length as u8;
        return Ok(());
    }
    let mut prefix = Vec::with_capacity(10);
    varint(&mut prefix, length as u64);
    out.splice(start..=start, prefix);
    Ok(())
}

/// Reads a message front to back.
pub(crate) struct Reader<'b> {
    rest: &'b [u8],
}

impl<'b> Reader<'b> {
    pub(crate) fn new(bytes: &'b [u8]) -> Self {
        Reader { rest: bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn varint(&mut self) -> Result<u64, Error> {
        let mut value = 0_u64;
        for (index, byte) in self.rest.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * index).min(63);
            if byte & 0x80 == 0 {
                self.rest = &self.rest[index + 1..];
                return Ok(value);
            }
        }
        if self.rest.len() < 10 { Err(Error::Truncated) } else { Err(Error::Malformed("integer overflow".to_owned())) }
    }

    /// The next field's number and wire type; `None` at the end.
    pub(crate) fn tag(&mut self) -> Result<Option<(u32, u8)>, Error> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        match u32::try_from(tag >> 3) {
            Ok(number) if number > 0 => Ok(Some((number, (tag & 7) as u8))),
            _ => Err(Error::Malformed(format!("illegal tag {}", tag >> 3))),
        }
    }

    fn take(&mut self, length: usize) -> Result<&'b [u8], Error> {
        if length > self.rest.len() {
            return Err(Error::Truncated);
        }
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        Ok(taken)
    }

    /// A field with a length.
    pub(crate) fn bytes(&mut self, wire: u8) -> Result<&'b [u8], Error> {
        expect(wire, 2)?;
        let length = self.varint()?;
        self.take(usize::try_from(length).map_err(|_| Error::Truncated)?)
    }

    pub(crate) fn text(&mut self, wire: u8) -> Result<&'b str, Error> {
        let bytes = self.bytes(wire)?;
        std::str::from_utf8(bytes).map_err(|error| Error::Malformed(format!("text is not UTF-8: {error}")))
    }

    pub(crate) fn double(&mut self) -> Result<f64, Error> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        Ok(f64::from_le_bytes(bytes))
    }

    /// Passes over a field that nobody knows.
    pub(crate) fn skip(&mut self, wire: u8) -> Result<(), Error> {
        match wire {
            0 => self.varint().map(|_| ()),
            1 => self.take(8).map(|_| ()),
            2 => self.bytes(2).map(|_| ()),
            5 => self.take(4).map(|_| ()),
            _ => Err(Error::Malformed(format!("illegal wireType {wire}"))),
        }
    }
}

/// Checks a field's wire type.
pub(crate) fn expect(wire: u8, expected: u8) -> Result<(), Error> {
    if wire == expected { Ok(()) } else { Err(Error::Malformed(format!("wrong wireType = {wire}, expected {expected}"))) }
}

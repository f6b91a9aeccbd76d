//! GGML's number formats: names and sizes, as `ggml.h` numbers them. A format is a row's values in groups, each group a
//! few scales and the values' bits.
use std::fmt;

/// A format by its number. Formats that this list lacks have a number still, and a name that says it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorType(pub u32);

/// The unit of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Values in it.
    pub values: u64,
    /// Bytes of it.
    pub bytes: u64,
}

#[allow(missing_docs, reason = "GGML's own names")]
impl TensorType {
    pub const F32: Self = Self(0);
    pub const F16: Self = Self(1);
    pub const Q4_0: Self = Self(2);
    pub const Q4_1: Self = Self(3);
    pub const Q5_0: Self = Self(6);
    pub const Q5_1: Self = Self(7);
    pub const Q8_0: Self = Self(8);
    pub const Q2_K: Self = Self(10);
    pub const Q3_K: Self = Self(11);
    pub const Q4_K: Self = Self(12);
    pub const Q5_K: Self = Self(13);
    pub const Q6_K: Self = Self(14);
    pub const BF16: Self = Self(30);
}

/// Number, name, values and bytes of a group; no bytes where nobody here needs them.
const TYPES: [(u32, &str, u64, u64); 34] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 0, 0),
];

impl TensorType {
    /// Sizes, of the formats that we have them of.
    pub fn group(self) -> Option<Group> {
        let &(_, _, values, bytes) = TYPES.iter().find(|(number, ..)| *number == self.0)?;
        (values > 0).then_some(Group { values, bytes })
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match TYPES.iter().find(|(number, ..)| *number == self.0) {
            Some((_, name, ..)) => f.write_str(name),
            None => write!(f, "number {}", self.0),
        }
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

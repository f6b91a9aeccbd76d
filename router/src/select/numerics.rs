//! How nodes compute: what one of them must have in common with another to go on with its answer bit for bit. The nodes
//! say it by name when they register; here names are only compared, so that a new kind of node needs no change.
use tandem_proto::v1;

/// Of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numerics {
    /// The order of its additions.
    pub arithmetic: String,
    /// How the values of its KV blocks lie, and their number format.
    pub kv_order: String,
}

impl Numerics {
    /// What a node says of itself.
    pub fn of(info: &v1::Register) -> Self {
        Self { arithmetic: info.arithmetic.clone(), kv_order: info.kv_order.clone() }
    }

    /// Whether this node computes so.
    pub fn are_of(&self, info: &v1::Register) -> bool {
        (&self.arithmetic, &self.kv_order) == (&info.arithmetic, &info.kv_order)
    }
}

/// In which way a node differs from another one, and what to change; `None` where they can go on with each other's
/// answers. Both nodes are named.
pub fn difference(this: &v1::Register, other: &v1::Register) -> Option<String> {
    let (name, other_name) = (&this.node_id, &other.node_id);
    if this.arithmetic != other.arithmetic {
        let and_kv = if this.kv_order == other.kv_order {
            String::new()
        } else {
            format!(", and KV lies in order `{}` on one, `{}` on the other", this.kv_order, other.kv_order)
        };
        return Some(format!(
            "node `{name}` computes in arithmetic `{}`, node `{other_name}` in `{}`{and_kv}: their answers would \
             differ in some tokens; start all nodes on the processor or all on GPUs (--device), with the same --arithmetic and \
             the same --isa, and all or none with --simulated; on two kinds of processors `--arithmetic f32` is what \
             they share",
            this.arithmetic, other.arithmetic
        ));
    }
    (this.kv_order != other.kv_order).then(|| {
        format!(
            "node `{name}` has KV in order `{}`, node `{other_name}` in `{}`: start all nodes with the same --kv-dtype",
            this.kv_order, other.kv_order
        )
    })
}

impl std::fmt::Display for Numerics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` over KV `{}`", self.arithmetic, self.kv_order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_says_what_to_change() {
        let of = |(arithmetic, kv_order): (&str, &str), node_id: &str| v1::Register {
            node_id: node_id.into(),
            arithmetic: arithmetic.into(),
            kv_order: kv_order.into(),
            ..v1::Register::default()
        };
        let difference = |this, other| difference(&of(this, "a"), &of(other, "b"));
        let (exact, dots, int8) = (("f32", "bf16-pairs"), ("bf16-dots", "bf16-pairs"), ("f32", "int8-pairs"));
        assert_eq!(difference(exact, exact), None);
        let words = difference(dots, exact).expect("it differs");
        assert!(words.contains("node `a` computes in arithmetic `bf16-dots`, node `b` in `f32`"), "{words}");
        assert!(words.contains("--arithmetic f32") && words.contains("--isa") && !words.contains("--kv-dtype"));
        let gpu = ("mma-k4096", "token-rows");
        let words = difference(gpu, dots).expect("it differs");
        assert!(words.contains("`mma-k4096`") && words.contains("all on GPUs (--device)"), "{words}");
        assert!(words.contains("KV lies in order `token-rows` on one, `bf16-pairs` on the other"), "{words}");
        let words = difference(int8, exact).expect("it differs");
        assert!(words.contains("`int8-pairs`, node `b` in `bf16-pairs`") && words.contains("--kv-dtype"), "{words}");
    }
}

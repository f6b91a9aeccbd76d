//! Headers written here and read back, cut, damaged and foreign ones: an error and never a panic.
use proptest::prelude::*;
use tandem_gguf::tensor_type::Group;
use tandem_gguf::{GgufError, Header, Split, TensorType, Value, split};

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    /// The innermost first, as in the file.
    dims: Vec<u64>,
    dtype: u32,
    at: u64,
}

/// Version 1 has lengths of 32 bits.
fn length(version: u32, length: usize) -> Vec<u8> {
    if version == 1 { (length as u32).to_le_bytes().into() } else { (length as u64).to_le_bytes().into() }
}

fn string(version: u32, text: &str) -> Vec<u8> {
    [&length(version, text.len()), text.as_bytes()].concat()
}

/// Type and bytes of a value.
fn value(version: u32, value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::U8(x) => (0, x.to_le_bytes().into()),
        Value::I8(x) => (1, x.to_le_bytes().into()),
        Value::U16(x) => (2, x.to_le_bytes().into()),
        Value::I16(x) => (3, x.to_le_bytes().into()),
        Value::U32(x) => (4, x.to_le_bytes().into()),
        Value::I32(x) => (5, x.to_le_bytes().into()),
        Value::F32(x) => (6, x.to_le_bytes().into()),
        Value::Bool(x) => (7, vec![u8::from(*x)]),
        Value::String(x) => (8, string(version, x)),
        Value::Array(items) => {
            let items: Vec<(u32, Vec<u8>)> = items.iter().map(|item| self::value(version, item)).collect();
            let kind = items.first().map_or(4, |(kind, _)| *kind);
            let mut bytes = kind.to_le_bytes().to_vec();
            bytes.extend(length(version, items.len()));
            items.iter().for_each(|(_, item)| bytes.extend(item));
            (9, bytes)
        }
        Value::U64(x) => (10, x.to_le_bytes().into()),
        Value::I64(x) => (11, x.to_le_bytes().into()),
        Value::F64(x) => (12, x.to_le_bytes().into()),
    }
}

fn header(version: u32, keys: &[(String, Value)], tensors: &[Tensor]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(length(version, tensors.len()));
    bytes.extend(length(version, keys.len()));
    for (key, what) in keys {
        let (kind, what) = value(version, what);
        bytes.extend([string(version, key), kind.to_le_bytes().to_vec(), what].concat());
    }
    for tensor in tensors {
        bytes.extend(string(version, &tensor.name));
        bytes.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|dim| bytes.extend(length(version, *dim as usize)));
        bytes.extend(tensor.dtype.to_le_bytes());
        bytes.extend(tensor.at.to_le_bytes());
    }
    bytes
}

fn scalars() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        (-1e9f32..1e9).prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        "[a-zé<>|]{0,12}".prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        (-1e9f64..1e9).prop_map(Value::F64),
    ]
}

fn values() -> impl Strategy<Value = Value> {
    let array = (scalars(), 0usize..6).prop_map(|(item, count)| Value::Array(vec![item; count])).boxed();
    let nested = (array.clone(), 1usize..3).prop_map(|(item, count)| Value::Array(vec![item; count]));
    prop_oneof![6 => scalars(), 2 => array, 1 => nested]
}

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let one = (prop::collection::vec(0u64..1 << 20, 0..5), 0u32..45, 0u64..1 << 30);
    prop::collection::vec(one, 0..6).prop_map(|all| {
        let name = |(i, (dims, dtype, at)): (usize, (Vec<u64>, u32, u64))| Tensor {
            name: format!("blk.{i}.weight"),
            dims,
            dtype,
            at: at * 32,
        };
        all.into_iter().enumerate().map(name).collect()
    })
}

fn keys() -> impl Strategy<Value = Vec<(String, Value)>> {
    let all = prop::collection::vec(values(), 0..8);
    all.prop_map(|all| all.into_iter().enumerate().map(|(i, value)| (format!("key.{i}"), value)).collect())
}

proptest! {
    #[test]
    fn what_is_written_is_read_and_every_cut_asks_for_more(
        version in 1u32..4, keys in keys(), tensors in tensors(), tail in 0usize..100, cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = header(version, &keys, &tensors);
        let length = bytes.len();
        bytes.resize(length + tail, 7);
        let read = Header::parse(&bytes).expect("a whole header");
        for (key, value) in &keys {
            prop_assert_eq!(read.value(key), Some(value));
        }
        prop_assert_eq!(read.tensors().len(), tensors.len());
        prop_assert_eq!(read.data_at(), (length as u64).next_multiple_of(32));
        for tensor in &tensors {
            let info = read.tensor(&tensor.name).expect("there");
            let dims: Vec<u64> = tensor.dims.iter().rev().copied().collect();
            prop_assert_eq!((info.dtype, &info.dims, info.at), (TensorType(tensor.dtype), &dims, read.data_at() + tensor.at));
        }
        let cut = cut.index(length);
        prop_assert_eq!(Header::parse(&bytes[..cut]), Err(GgufError::Truncated(cut)));
    }

    #[test]
    fn damaged_headers_never_panic(
        version in 1u32..4, keys in keys(), tensors in tensors(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = header(version, &keys, &tensors);
        for (at, byte) in flips {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(header) = Header::parse(&bytes) {
            let _ = (header.end(), header.split());
            header.tensors().values().for_each(|info| _ = info.bytes());
        }
    }

    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), version in 1u8..4) {
        let _ = Header::parse(&bytes);
        let _ = Header::parse(&[&[b'G', b'G', b'U', b'F', version, 0, 0, 0], &bytes[..]].concat());
    }
}

fn key(name: &str, value: Value) -> (String, Value) {
    (name.into(), value)
}

fn refused(bytes: &[u8]) -> String {
    Header::parse(bytes).expect_err("refused").to_string()
}

#[test]
fn what_is_no_header_of_ours_says_what_it_is() {
    assert!(refused(b"PK\x03\x04").contains("not a GGUF file"));
    assert!(refused(b"").contains("truncated"));
    assert!(refused(b"GGUF\0\0\0\x03").contains("big-endian"));
    assert!(refused(b"GGUF\x04\0\0\0").contains("version 4"));
    for wrong in [Value::U32(0), Value::U32(48), Value::I32(-32), Value::U64(1 << 40), Value::String("32".into())] {
        assert!(refused(&header(3, &[key("general.alignment", wrong)], &[])).contains("general.alignment"));
    }
    let twice = [key("a", Value::U8(1)), key("a", Value::U8(2))];
    assert!(refused(&header(3, &twice, &[])).contains("the key a is there twice"));
    let tensor = Tensor { name: "t".into(), dims: vec![4], dtype: 0, at: 0 };
    assert!(refused(&header(3, &[], &[tensor.clone(), tensor.clone()])).contains("the tensor t is there twice"));
    assert!(refused(&header(3, &[], &[Tensor { at: 33, ..tensor.clone() }])).contains("no multiple of 32"));
    assert!(refused(&header(3, &[], &[Tensor { at: u64::MAX / 32 * 32, ..tensor.clone() }])).contains("nowhere"));
    assert!(refused(&header(3, &[], &[Tensor { dims: vec![1; 5], ..tensor }])).contains("5 dimensions"));
}

#[test]
fn counts_are_bounded_before_memory_is_taken() {
    let head = |tensors: u64, keys: u64| {
        [b"GGUF\x03\0\0\0".to_vec(), tensors.to_le_bytes().into(), keys.to_le_bytes().into()].concat()
    };
    assert!(refused(&head(0, u64::MAX)).contains("keys"));
    assert!(refused(&head(u64::MAX, 0)).contains("tensors"));
    let long = [head(0, 1), u64::MAX.to_le_bytes().into()].concat();
    assert!(refused(&long).contains("string"));
    let mut array = [head(0, 1), string(3, "a"), 9u32.to_le_bytes().into(), 0u32.to_le_bytes().into()].concat();
    array.extend(u64::MAX.to_le_bytes());
    assert!(refused(&array).contains("array"));
    // Arrays of one array each, deeper than anybody's.
    let mut deep = [head(0, 1), string(3, "a"), 9u32.to_le_bytes().into()].concat();
    (0..100).for_each(|_| deep.extend([&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat()));
    assert!(refused(&deep).contains("depth"));
}

#[test]
fn sizes_are_those_of_ggml() {
    for (dtype, name, values, bytes) in
        [(TensorType::Q4_K, "Q4_K", 256, 144), (TensorType::BF16, "BF16", 1, 2), (TensorType(39), "MXFP4", 32, 17)]
    {
        assert_eq!((dtype.to_string().as_str(), dtype.group()), (name, Some(Group { values, bytes })));
    }
    assert_eq!((TensorType(77).to_string().as_str(), TensorType(77).group()), ("number 77", None));
    let of = |dims: &[u64], dtype: TensorType| {
        let tensor = Tensor { name: "t".into(), dims: dims.into(), dtype: dtype.0, at: 64 };
        let header = Header::parse(&header(3, &[], &[tensor])).expect("a header");
        (header.tensor("t").expect("there").bytes(), header.end().map(|end| end - header.data_at()))
    };
    assert_eq!(of(&[64, 3], TensorType::Q8_0), (Some(3 * 2 * 34), Some(64 + 204)));
    assert_eq!(of(&[48, 2], TensorType::Q8_0).0, None, "a row and a half group");
    assert_eq!(of(&[1 << 40, 1 << 40], TensorType::F32), (None, None));
}

fn part(name: &str, number: u16, count: u16, tensors: i32, more: &[(String, Value)]) -> Header {
    let mut keys = vec![
        key("split.no", Value::U16(number)),
        key("split.count", Value::U16(count)),
        key("split.tensors.count", Value::I32(tensors)),
    ];
    keys.extend_from_slice(more);
    let tensor = Tensor { name: name.into(), dims: vec![8], dtype: 0, at: 0 };
    Header::parse(&header(3, &keys, &[tensor])).expect("a header")
}

#[test]
fn parts_are_found_by_name_and_compared() {
    let name = [key("general.name", Value::String("A".into()))];
    let first = part("a", 0, 3, 3, &name);
    let split = first.split().expect("numbers").expect("a part");
    assert_eq!(split, Split { number: 0, count: 3, tensors: 3 });
    let others = split.names_of_the_others("m-00001-of-00003.gguf").expect("the first");
    assert_eq!(others, ["m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]);
    let why = |result: Result<Vec<String>, GgufError>| result.expect_err("refused").to_string();
    assert!(why(split.names_of_the_others("m.gguf")).contains("-00001-of-00003.gguf"));
    let second = part("b", 1, 3, 3, &[]).split().expect("numbers").expect("a part");
    assert!(why(second.names_of_the_others("m-00002-of-00003.gguf")).contains("give the first one, m-00001-of-00003"));

    assert_eq!(split.check_part(&first, 1, &part("b", 1, 3, 3, &[])), Ok(()));
    let foreign = |header: Header| split.check_part(&first, 1, &header).expect_err("foreign").to_string();
    assert!(foreign(part("b", 2, 3, 3, &[])).contains("it is part 3 of 3"));
    assert!(foreign(part("b", 1, 4, 3, &[])).contains("part 2 of 4"));
    assert!(foreign(part("b", 1, 3, 9, &[])).contains("9 tensors"));
    assert!(foreign(part("b", 1, 3, 3, &[key("general.name", Value::String("B".into()))])).contains("general.name"));
    let whole = Header::parse(&header(3, &[], &[])).expect("a header");
    assert_eq!(whole.split(), Ok(None));
    assert!(foreign(whole).contains("of its own"));
    assert_eq!(split.check_tensors(3), Ok(()));
    assert!(split.check_tensors(2).expect_err("one is missing").to_string().contains("2 tensors, not 3"));

    let odd = Header::parse(&header(3, &[key("split.count", Value::U16(2))], &[])).expect("a header");
    assert!(odd.split().is_err());
}

#[test]
fn a_model_is_called_what_its_parts_are_called() {
    for (stem, name) in [
        ("Llama-3.1-8B-00001-of-00003", "Llama-3.1-8B"),
        ("Llama-3.1-8B", "Llama-3.1-8B"),
        ("a-1-of-3", "a-1-of-3"),
        ("-00001-of-00002", "-00001-of-00002"),
    ] {
        assert_eq!(split::model_name(stem), name);
    }
}

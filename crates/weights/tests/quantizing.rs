//! Quantised values against those of bitsandbytes: `fixtures/make_quantize.py` wrote them.

use std::path::Path;

use cinch_weights::{
    DYNAMIC_MAP, NF4_MAP, Nf4, Nf4Parts, WeightFiles, bf16_bits, bf16_value, dequantize_int8,
    dequantize_nf4, dequantize_scales, f16_bits, f16_value, quantize_int8, quantize_nf4,
    quantize_nf4_bf16, quantize_scales, scale_offset,
};

struct Fixture(WeightFiles);

impl Fixture {
    fn open() -> Fixture {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantize.safetensors");
        Fixture(WeightFiles::open(&path).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.0.tensor(name).unwrap();
        let mut values = vec![0.0; tensor.num_elements()];
        self.0
            .read_f32(name, 0..tensor.rows(), &mut values)
            .unwrap();
        values
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let tensor = self.0.tensor(name).unwrap();
        let mut bytes = vec![0; tensor.num_elements()];
        self.0.read(name, 0..tensor.rows(), &mut bytes).unwrap();
        bytes
    }

    fn columns(&self, name: &str) -> usize {
        self.0.tensor(name).unwrap().row_elements()
    }
}

/// The type of the weights, in which bitsandbytes gives the values back.
fn rounded(case: &str, value: f32) -> f32 {
    match case {
        "large" => bf16_value(bf16_bits(value)),
        "half" => f16_value(f16_bits(value)),
        _ => value,
    }
}

/// Equal, element by element; tells the first that is not.
fn assert_same<T: PartialEq + std::fmt::Debug>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mut pairs = found.iter().zip(expected).enumerate();
    let differing = pairs.find(|(_, (found, expected))| found != expected);
    assert!(differing.is_none(), "{what}: {differing:?}");
}

const CASES: [&str; 3] = ["large", "half", "odd"];

#[test]
fn tables_are_those_of_bitsandbytes() {
    let fixture = Fixture::open();
    assert_same("nf4", &fixture.floats("nf4_map"), &NF4_MAP);
    assert_same("dynamic", &fixture.floats("dynamic_map"), &DYNAMIC_MAP);
}

#[test]
fn nf4_is_that_of_bitsandbytes() {
    let fixture = Fixture::open();
    for case in CASES {
        let values = fixture.floats(&format!("{case}.weight"));
        let mut codes = vec![0; Nf4::codes_bytes(values.len())];
        let mut absmax = vec![0.0; Nf4::blocks(values.len())];
        quantize_nf4(&values, &mut codes, &mut absmax);
        assert_same(
            &format!("{case}.codes"),
            &codes,
            &fixture.bytes(&format!("{case}.codes")),
        );
        assert_same(
            &format!("{case}.absmax"),
            &absmax,
            &fixture.floats(&format!("{case}.absmax")),
        );

        let mut back = vec![0.0; values.len()];
        dequantize_nf4(&codes, &absmax, &mut back);
        let back: Vec<f32> = back.into_iter().map(|value| rounded(case, value)).collect();
        let expected = fixture.floats(&format!("{case}.dequantized"));
        assert_same(case, &back, &expected);
    }
}

#[test]
fn bf16_is_quantised_without_a_copy_in_f32() {
    let fixture = Fixture::open();
    let tensor = fixture.0.tensor("large.weight").unwrap();
    let mut bits = vec![0; tensor.num_elements()];
    fixture
        .0
        .read_bf16(&tensor.name, 0..tensor.rows(), &mut bits)
        .unwrap();
    let mut codes = vec![0; Nf4::codes_bytes(bits.len())];
    let mut absmax = vec![0.0; Nf4::blocks(bits.len())];
    quantize_nf4_bf16(&bits, &mut codes, &mut absmax);
    assert_same("large.codes", &codes, &fixture.bytes("large.codes"));
    assert_same("large.absmax", &absmax, &fixture.floats("large.absmax"));
}

#[test]
fn double_quantisation_is_that_of_bitsandbytes() {
    let fixture = Fixture::open();
    for case in CASES {
        let absmax = fixture.floats(&format!("{case}.absmax"));
        let expected_offset = fixture.floats(&format!("{case}.double.offset"))[0];
        let offset = scale_offset(&absmax);
        // Summed in another order there: up to one unit in the last place.
        assert!(
            offset == expected_offset
                || offset == expected_offset.next_up()
                || offset == expected_offset.next_down(),
            "{case}: {offset} {expected_offset}"
        );
        let mut codes = vec![0; absmax.len()];
        let mut scales = vec![0.0; absmax.len().div_ceil(Nf4::SCALE_BLOCK)];
        quantize_scales(&absmax, expected_offset, &mut codes, &mut scales);
        assert_same(
            &format!("{case}.double.codes"),
            &codes,
            &fixture.bytes(&format!("{case}.double.codes")),
        );
        assert_same(
            &format!("{case}.double.scales"),
            &scales,
            &fixture.floats(&format!("{case}.double.scales")),
        );

        let mut back = vec![0.0; absmax.len()];
        dequantize_scales(&codes, &scales, expected_offset, &mut back);
        let elements = fixture
            .0
            .tensor(&format!("{case}.weight"))
            .unwrap()
            .num_elements();
        let mut values = vec![0.0; elements];
        dequantize_nf4(&fixture.bytes(&format!("{case}.codes")), &back, &mut values);
        let values: Vec<f32> = values
            .into_iter()
            .map(|value| rounded(case, value))
            .collect();
        let expected = fixture.floats(&format!("{case}.double.dequantized"));
        assert_same(case, &values, &expected);
    }
}

#[test]
fn int8_is_that_of_bitsandbytes() {
    let fixture = Fixture::open();
    for case in CASES {
        let name = format!("{case}.weight");
        let (values, columns) = (fixture.floats(&name), fixture.columns(&name));
        let mut codes = vec![0; values.len()];
        let mut scales = vec![0.0; values.len() / columns];
        quantize_int8(&values, columns, &mut codes, &mut scales);
        let expected: Vec<i8> = fixture
            .bytes(&format!("{case}.int8.codes"))
            .into_iter()
            .map(|byte| byte as i8)
            .collect();
        assert_same(case, &codes, &expected);
        assert_same(
            &format!("{case}.int8.scales"),
            &scales,
            &fixture.floats(&format!("{case}.int8.scales")),
        );
        // The fixture of the largest has no room for its values.
        if case != "large" {
            let mut back = vec![0.0; values.len()];
            dequantize_int8(&codes, columns, &scales, &mut back);
            let expected = fixture.floats(&format!("{case}.int8.dequantized"));
            assert_same(&format!("{case}.int8.dequantized"), &back, &expected);
        }

        let mut read = (vec![0; codes.len()], vec![0.0; scales.len()]);
        fixture
            .0
            .read_int8(&name, &mut read.0, &mut read.1)
            .unwrap();
        assert_eq!(read, (codes, scales));
    }
}

/// Reading gives what quantising the whole tensor gives, also over several pieces.
#[test]
fn a_tensor_is_quantised_while_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (rows, columns) = (211, 997);
    let values: Vec<f32> = (0..rows * columns)
        .map(|n: usize| (n.wrapping_mul(2_654_435_761) % 10_007) as f32 / 5000.0 - 1.0)
        .collect();
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![rows, columns], &bytes);
    let file = safetensors::serialize([("w", view.unwrap())], None).unwrap();
    std::fs::write(&path, file).unwrap();
    let files = WeightFiles::open(&path).unwrap();

    let mut codes = vec![0; Nf4::codes_bytes(values.len())];
    let mut absmax = vec![0.0; Nf4::blocks(values.len())];
    quantize_nf4(&values, &mut codes, &mut absmax);
    for double in [false, true] {
        let format = Nf4 { double };
        let layout = format.layout(values.len());
        let mut read_codes = vec![0; layout.codes];
        let mut scale_codes = vec![0; layout.scale_codes];
        let mut scales = vec![0.0; layout.scales];
        let mut offset = vec![0.0; layout.offsets];
        let parts = Nf4Parts {
            codes: &mut read_codes,
            scale_codes: &mut scale_codes,
            scales: &mut scales,
            offset: &mut offset,
        };
        files.read_nf4("w", format, parts).unwrap();
        assert_same("codes", &read_codes, &codes);
        if !double {
            assert_same("scales", &scales, &absmax);
            continue;
        }
        assert_eq!(offset, [scale_offset(&absmax)]);
        let mut expected = (vec![0; layout.scale_codes], vec![0.0; layout.scales]);
        quantize_scales(&absmax, offset[0], &mut expected.0, &mut expected.1);
        assert_eq!((scale_codes, scales), expected);
    }
    let mut short = vec![0; 3];
    let parts = Nf4Parts {
        codes: &mut short,
        scale_codes: &mut [],
        scales: &mut [],
        offset: &mut [],
    };
    let error = files
        .read_nf4("w", Nf4 { double: false }, parts)
        .unwrap_err();
    assert!(error.to_string().contains("bytes of codes"), "{error}");
}

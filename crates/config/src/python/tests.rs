use super::*;
use crate::outline::rows::{Row, row, rows};

fn read(text: &str) -> Vec<Row> {
    rows(&outline(text).unwrap(), text)
}

#[test]
fn constants_of_every_kind() {
    let text = r#""""Doc = 1"""
import os
A = 4  # four
B: int = 1_000; C = 'x'
D = (
    # inside
    0x10
)
E = -1
F = 2 * A
G = f"run-{A}"
H = "a" \
    "b"
I = J = 3
K, L = 1, 2
M = [1, 2]
N = None
O = A == 4
P: "list[int]" = True
Q: int
"#;
    assert_eq!(
        read(text),
        [
            row("A", "4", "4", false),
            row("B", "1000", "1_000", false),
            row("C", "\"x\"", "'x'", false),
            row("D", "16", "0x10", false),
            row("E", "-1", "-1", false),
            row("F", "an expression", "2 * A", false),
            row("G", "an expression", "f\"run-{A}\"", false),
            row("H", "\"ab\"", "\"a\" \\\n    \"b\"", true),
            row("I", "a chained assignment", "J = 3", false),
            row("M", "[1, 2]", "[1, 2]", false),
            row("N", "null", "None", false),
            row("O", "an expression", "A == 4", false),
            row("P", "true", "True", false),
        ]
    );
}

#[test]
fn dictionaries_calls_and_classes() {
    let text = "TRAINING: dict[str, int] = {\n    \"batch\": 1,  # one\n    'deep': {'x': 2, **REST, KEY: 5},\n    \"lr\": 2e-4 if A else 1,\n}\nargs = transformers.TrainingArguments(\n    \"out\", bf16=True, n=dict(m=1), warm=max(1, 2),\n)\n@dataclass\nclass Config(Base):\n    \"\"\"size = 9\"\"\"\n    batch_size: int = 2\n    rate: float = field(default=1e-3, repr=False)\n    steps: int = Field(10, gt=0)\n    tags: list = field(default_factory=list)\n    class Inner: depth = 3\n    def method(self):\n        local = 4\nlast = set()\n";
    assert_eq!(
        read(text),
        [
            row("TRAINING.batch", "1", "1", false),
            row("TRAINING.deep.x", "2", "2", false),
            row("TRAINING.lr", "an expression", "2e-4 if A else 1", false),
            row("TrainingArguments.bf16", "true", "True", false),
            row("TrainingArguments.n.m", "1", "1", false),
            row(
                "TrainingArguments.warm",
                "an expression",
                "max(1, 2)",
                false
            ),
            row("Config.batch_size", "2", "2", false),
            row("Config.rate", "1e-3", "1e-3", false),
            row("Config.steps", "10", "10", false),
            row(
                "Config.tags",
                "an expression",
                "field(default_factory=list)",
                false
            ),
            row("Config.Inner.depth", "3", "3", false),
            row("last", "an expression", "set()", false),
        ]
    );
}

#[test]
fn what_is_set_elsewhere_is_uncertain() {
    let text = "A = 1\nB = 2\nC = {'x': 1, 'y': 2}\nD = 4\ncfg.rate = 3\nif DEBUG:\n    A = 9\nB *= 2\nfor i in r: C['x'] = i\ndef f():\n    D = 5\nif __name__ == '__main__':\n    D = 6\n";
    assert_eq!(
        read(text),
        [
            row("A", "1", "1", true),
            row("B", "2", "2", true),
            row("C.x", "1", "1", true),
            row("C.y", "2", "2", false),
            row("D", "4", "4", false),
            row("cfg.rate", "3", "3", false),
        ]
    );
}

#[test]
fn calls_are_read_wherever_they_stand() {
    let text = "BATCH = 4\nEVAL = BATCH * 2\ndef main(steps=3):\n    model_id = 'a/b'\n    model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.bfloat16)\n    tokenizer = AutoTokenizer.from_pretrained('other')\n    args = SFTConfig(per_device_train_batch_size=BATCH, max_steps=steps, lr=RATES['x'],\n        eval=BATCH * 2)\n    trainer = Trainer(model, peft_config=LoraConfig(r=8), other=Thing(r=9))\n    again = AutoModelForCausalLM.from_pretrained('c/d')\nRATES = {'x': 1e-3}\nif __name__ == '__main__':\n    main()\n";
    assert_eq!(
        read(text),
        [
            row("BATCH", "4", "4", false),
            row("EVAL", "an expression", "BATCH * 2", false),
            row(
                "model.pretrained_model_name_or_path",
                "\"a/b\"",
                "'a/b'",
                false
            ),
            row(
                "model.torch_dtype",
                "\"torch.bfloat16\"",
                "torch.bfloat16",
                true
            ),
            row("SFTConfig.per_device_train_batch_size", "4", "4", false),
            row("SFTConfig.max_steps", "an expression", "steps", false),
            row("SFTConfig.lr", "1e-3", "1e-3", false),
            row("SFTConfig.eval", "an expression", "BATCH * 2", false),
            row("LoraConfig.r", "8", "8", false),
            row("RATES.x", "1e-3", "1e-3", false),
        ]
    );
}

#[test]
fn names_that_are_set_twice_are_not_followed() {
    let text = "A = 1\nA = 2\nB = 1\nB += 1\nC, D = 1, 2\nfor E in r: pass\nTrainingArguments(a=A, b=B, c=C, e=E, f=F)\n";
    let values = read(text).into_iter().filter(|row| row.0.contains('.'));
    assert!(values.clone().count() == 5 && values.into_iter().all(|row| row.1 == "an expression"));
}

#[test]
fn strings_are_decoded() {
    for (literal, text) in [
        (r#""a\n\x41\u00e9\q\\""#, "a\nAé\\q\\"),
        ("r'\\n'", "\\n"),
        ("'''it's'''", "it's"),
        ("''", ""),
        ("u'é'", "é"),
        ("'\\\n'", ""),
        ("'\\xg1'", "\\xg1"),
    ] {
        assert_eq!(literal::decode(literal).as_deref(), Some(text), "{literal}");
    }
    for literal in ["f'a'", "b'a'", "rb'a'", "Rf'a'"] {
        assert_eq!(literal::decode(literal), None, "{literal}");
    }
}

#[test]
fn files_without_settings() {
    assert_eq!(outline("# nothing\n"), Err(Fault::Empty));
    assert_eq!(outline("import os\nprint(1)\n"), Err(Fault::NotSections));
    assert!(outline(&("A = ".to_owned() + &"{'a': ".repeat(3000) + &"}".repeat(3000))).is_err());
}

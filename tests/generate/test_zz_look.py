from pathlib import Path
from frameloom.core.ranks import Ranks
from frameloom.generate.many import sample_many
from frameloom.generate.pipeline import Request
from frameloom.generate.rank_group import RankGroup
import numpy as np
from frameloom.data.media import contact_sheet, write_image
from frameloom.generate.pipeline import generate
def test_look(load, files):
    rows, labels = [], []
    for name in ("cogvideox_fun","opensora2","opensora_plan"):
        s = load(name, keep="pixels" if name=="cogvideox_fun" else "latent")
        for label, media in {"text":{}, "image":{"head":files.picture}, "both":{"head":files.picture,"tail":files.other}, "continue":{"video":files.clip}, "inpaint":{"video":files.clip,"mask":files.ending if name=="opensora2" else files.square}}.items():
            rows.append(list(generate(s,[Request("a yellow square",1,**media)])[0].frames_FHWC)); labels.append(f"{name} {label} keep={s.settings.keep}")
        s = load(name, strength=0.3, steps=10)
        rows.append(list(generate(s,[Request("a yellow square",1,video=files.clip)])[0].frames_FHWC)); labels.append(f"{name} video strength .3")
    write_image(Path("/tmp/look.png"), contact_sheet(rows, labels, num_columns=2))

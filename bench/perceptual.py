"""What people see of two pictures, and of a picture and its prompt, by published networks, where they are installed.

LPIPS (Zhang et al., arXiv 1801.03924; package `lpips`): 0 for equal pictures. CLIP score (Hessel et al., arXiv
2104.08718; package `transformers`, with openai/clip-vit-base-patch32 in its cache): 0 to 100. ImageReward (Xu et al.,
arXiv 2304.05977; package `image-reward`): about -2 to 2, higher is better.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from PIL import Image

Measure = Callable[[torch.Tensor, torch.Tensor, str], float]
"""Of a picture and the uncached one, [3, H, W] in 0..1, and their prompt."""

CLIP = "openai/clip-vit-base-patch32"


def measures() -> dict[str, Measure]:
    """Name of the column → its measure, for each whose package is installed and whose weights are there."""
    found = {}
    for name, make in (("lpips", _lpips), ("clip_score", _clip_score), ("image_reward", _image_reward)):
        try:
            found[name] = make()
        except ImportError:
            continue
        except Exception as error:  # a download that failed, weights of another version
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"Without {name}: {reason}", file=sys.stderr)
    return found


def _lpips() -> Measure:
    import lpips

    network = lpips.LPIPS(net="alex", verbose=False)
    return lambda image, plain, prompt: network(image[None] * 2 - 1, plain[None] * 2 - 1).item()


def _clip_score() -> Measure:
    from transformers import CLIPModel, CLIPProcessor

    model, processor = (kind.from_pretrained(CLIP, local_files_only=True) for kind in (CLIPModel, CLIPProcessor))

    def score(image: torch.Tensor, plain: torch.Tensor, prompt: str) -> float:
        given = processor(text=[prompt], images=picture(image), return_tensors="pt", padding=True, truncation=True)
        out = model(**given)
        return max(0.0, 100 * torch.cosine_similarity(out.image_embeds, out.text_embeds).item())

    return score


def _image_reward() -> Measure:
    import ImageReward

    model = ImageReward.load("ImageReward-v1.0")
    return lambda image, plain, prompt: float(model.score(prompt, picture(image)))


def picture(image: torch.Tensor) -> Image.Image:
    """[3, H, W] in 0..1 as a picture."""
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())

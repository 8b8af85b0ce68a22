"""Transformers whose answer is mental arithmetic, and a run of DeepCache over one of them."""

import torch
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.dit import DiTSplit
from torch.nn.functional import interpolate

from kit.step_cache import every, features_of

FULL, SKIPPED = 14.6, 8.0


class Block(torch.nn.Module):
    """Writes its name down; its weights are there to be counted."""

    def __init__(self, called, name, width=2):
        super().__init__()
        self.called, self.name = called, name
        self.layer = torch.nn.Linear(width, width)


class Single(Block):
    def forward(self, x, vec, scale=2.0):
        self.called.append(self.name)
        return x * scale


class InPlaceSingle(Block):
    def forward(self, x, vec):
        self.called.append(self.name)
        return x.mul_(2)


class InPlaceDouble(Block):
    """Image doubled, text tripled, both in place, as Flux does."""

    def forward(self, img, txt, vec):
        self.called.append(self.name)
        img += img
        txt += 2 * txt
        return img, txt


class Joint(Block):
    """As SD3's: arguments by place, the context first, and none of it behind the last block."""

    def __init__(self, called, name, last=False):
        super().__init__(called, name)
        self.last = last

    def forward(self, *args, **kwargs):
        context, x = args
        self.called.append(self.name)
        return None if self.last else context * 3, x * 2


class Paired(Block):
    """As LTX 2's: picture and sound in one tuple, both changed in place."""

    def forward(self, x, vec):
        self.called.append(self.name)
        picture, sound = x
        return picture.mul_(2), sound.mul_(3)


class Pairs(torch.nn.Module):
    """Returns both, joined."""

    def __init__(self, count=5):
        super().__init__()
        self.called = []
        self.blocks = torch.nn.ModuleList(Paired(self.called, i) for i in range(count))

    def forward(self, picture, sound):
        self.called.clear()
        picture, sound = picture.clone(), sound.clone()
        for block in self.blocks:
            picture, sound = block((picture, sound), vec=None)
        return torch.cat((picture, sound), 1)


class Chain(torch.nn.Module):
    """One list of blocks; `between(x, i)` is what the model does behind block i."""

    def __init__(self, count=5, kind=Single, between=lambda x, i: x):
        super().__init__()
        self.called, self.between = [], between
        self.blocks = torch.nn.ModuleList(kind(self.called, i) for i in range(count))

    def forward(self, x):
        self.called.clear()
        for i, block in enumerate(self.blocks):
            x = self.between(block(x, vec=torch.ones(x.shape[0], 2)), i)
        return x


class Packed(Chain):
    """As MiniMax H3: the tokens of its one image have no batch."""

    def forward(self, x):
        return super().forward(x[0])[None]


class Doubles(torch.nn.Module):
    """Two streams in `double_blocks`, joined in `single_blocks`; residuals are added as in Flux."""

    def __init__(self, doubles=2, singles=3):
        super().__init__()
        self.called = []
        self.double_blocks = torch.nn.ModuleList(InPlaceDouble(self.called, f"d{i}") for i in range(doubles))
        self.single_blocks = torch.nn.ModuleList(Single(self.called, f"s{i}") for i in range(singles))

    def forward(self, img, txt, control=None):
        self.called.clear()
        img, txt, vec = img.clone(), txt.clone(), torch.ones(img.shape[0], 2)
        for i, block in enumerate(self.double_blocks):
            img, txt = block(img=img, txt=txt, vec=vec)
            if control is not None and control["input"][i] is not None:
                img += control["input"][i]
        x = torch.cat((txt, img), 1)
        for i, block in enumerate(self.single_blocks):
            x = block(x, vec=vec)
            if control is not None and control["output"][i] is not None:
                x[:, txt.shape[1] :] += control["output"][i]
        return x[:, txt.shape[1] :]


class Joints(torch.nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.called = []
        self.joint_blocks = torch.nn.ModuleList(Joint(self.called, i, i == count - 1) for i in range(count))

    def forward(self, x, context):
        self.called.clear()
        for block in self.joint_blocks:
            context, x = block(context, x, c=None)
        return x


class Sampler:
    """A run over one split."""

    def __init__(self, model, **settings):
        self.model, self.split = model, DiTSplit(model)
        self.features = features_of(self.split, every(**settings), levels=(14.6, 8.0, 4.0, 2.0, 0.0))
        self.run = self.features.run

    def call(self, sigma, x, *args, uuids="a", control=None):
        self.run.begin(sigma)
        keys = self.features.branches(x, list(uuids), list(range(len(uuids))), None)
        self.skipped = keys is not None and self.features.can_skip(keys)
        if keys is None:
            return self.model(x, *args)
        stand_ins = self.split.skip_layers if self.skipped else self.split.full_layers
        given = {} if control is None else {"control": self.split.withhold(control) if self.skipped else control}
        with substituted(stand_ins(self.features, keys), Order.CACHED):
            out = self.model(x, *args, **given)
        if self.skipped:
            self.split.check_done()
        return out


def tokens(*values, count=3):
    """[B, count, 2], each image filled with its value."""
    return torch.stack([torch.full((count, 2), float(value)) for value in values])


def untouched(model):
    return not any("forward" in module.__dict__ for module in model.modules())


class Scale(torch.nn.Module):
    """Doubles [B, 1, H, W]; where it is asked to, as attention is, in a tuple of one."""

    def __init__(self, name, called):
        super().__init__()
        self.name, self.called = name, called

    def forward(self, x, *args, return_dict=True, **kwargs):
        self.called.append(self.name)
        return x * 2 if return_dict else (x * 2,)


class Resampler(Scale):
    """Halves height and width, rounding up, or brings them to `size`."""

    def forward(self, x, size=None):
        out = super().forward(x)
        return out[..., ::2, ::2] if size is None else interpolate(out, size)


class UNetBlock(torch.nn.Module):
    def __init__(self, name, called, resnets, attends, samplers):
        super().__init__()
        layers = lambda kind, cls, n: torch.nn.ModuleList(cls(f"{name}.{kind}{i}", called) for i in range(n))  # noqa: E731
        self.attentions = layers("attention", Scale, resnets) if attends else None  # Registered first, as in diffusers.
        self.resnets = layers("resnet", Scale, resnets)
        self.has_cross_attention = attends
        sampler = torch.nn.ModuleList([Resampler(f"{name}.sampler", called)]) if samplers else None
        setattr(self, samplers or "downsamplers", sampler)

    def layer(self, index, x):
        x = self.resnets[index](x, None)
        return self.attentions[index](x, encoder_hidden_states=None, return_dict=False)[0] if self.attentions else x


class ToyDiffusersUNet(torch.nn.Module):
    """Two levels of the walk that diffusers' UNet does; skips are concatenated and averaged."""

    def __init__(self, middle=True):
        super().__init__()
        self.called = []
        self.conv_in = Scale("conv_in", self.called)
        self.down_blocks = torch.nn.ModuleList(
            [UNetBlock("d0", self.called, 2, True, "downsamplers"), UNetBlock("d1", self.called, 2, False, None)]
        )
        self.mid_block = Scale("middle", self.called) if middle else None
        self.up_blocks = torch.nn.ModuleList(
            [UNetBlock("u0", self.called, 3, False, "upsamplers"), UNetBlock("u1", self.called, 3, True, None)]
        )

    def forward(
        self,
        sample,
        timestep,
        down_block_additional_residuals=None,
        mid_block_additional_residual=None,
        down_intrablock_additional_residuals=None,
    ):
        self.called.clear()
        controls, middle = down_block_additional_residuals, mid_block_additional_residual
        adapters = down_intrablock_additional_residuals
        if adapters is None and middle is None:
            controls, adapters = None, controls
        x = self.conv_in(sample)
        skips = [x]
        for block in self.down_blocks:
            for index in range(2):
                x = block.layer(index, x)
                if index and block.attentions and adapters:
                    x = x + adapters.pop(0)
                skips.append(x)
            for sampler in block.downsamplers or ():
                x = sampler(x)
                skips.append(x)
            if not block.attentions and adapters:
                x += adapters.pop(0)
        if controls is not None:
            skips = [skip + residual for skip, residual in zip(skips, controls, strict=True)]
        if self.mid_block is not None:
            x = self.mid_block(x)
        if controls is not None:
            x = x + middle
        for block in self.up_blocks:
            for index in range(3):
                x = block.layer(index, torch.cat([x, skips.pop()], dim=1).mean(dim=1, keepdim=True))
            for sampler in getattr(block, "upsamplers", None) or ():
                x = sampler(x, skips[-1].shape[2:])
        return x

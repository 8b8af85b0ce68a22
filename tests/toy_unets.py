"""A UNet in diffusers' layout without diffusers: each layer writes its name down and doubles."""

import torch
from torch.nn.functional import interpolate


class Scale(torch.nn.Module):
    """Doubles [B, 1, H, W]; where it is asked to, as attention is, in a tuple of one."""

    def __init__(self, name, called):
        super().__init__()
        self.name, self.called = name, called

    def forward(self, x, *args, return_dict=True, **kwargs):
        self.called.append(self.name)
        return x * 2 if return_dict else (x * 2,)


class Sampler(Scale):
    """Halves height and width, rounding up, or brings them to `size`."""

    def forward(self, x, size=None):
        out = super().forward(x)
        return out[..., ::2, ::2] if size is None else interpolate(out, size)


class Block(torch.nn.Module):
    def __init__(self, name, called, resnets, attends, samplers):
        super().__init__()
        layers = lambda kind, cls, n: torch.nn.ModuleList(cls(f"{name}.{kind}{i}", called) for i in range(n))  # noqa: E731
        self.attentions = layers("attention", Scale, resnets) if attends else None  # Registered first, as in diffusers.
        self.resnets = layers("resnet", Scale, resnets)
        self.has_cross_attention = attends
        sampler = torch.nn.ModuleList([Sampler(f"{name}.sampler", called)]) if samplers else None
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
            [Block("d0", self.called, 2, True, "downsamplers"), Block("d1", self.called, 2, False, None)]
        )
        self.mid_block = Scale("middle", self.called) if middle else None
        self.up_blocks = torch.nn.ModuleList(
            [Block("u0", self.called, 3, False, "upsamplers"), Block("u1", self.called, 3, True, None)]
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

"""The trainer of denoising-diffusion-pytorch on sequences of random numbers."""

import torch
from denoising_diffusion_pytorch import denoising_diffusion_pytorch_1d as diffusion


def main():
    torch.manual_seed(0)
    model = diffusion.Unet1D(dim=8, dim_mults=(1, 2), channels=2)
    process = diffusion.GaussianDiffusion1D(model, seq_length=16, timesteps=8)
    sequences = torch.rand(600, 2, 16)
    trainer = diffusion.Trainer1D(
        process,
        diffusion.Dataset1D(sequences),
        train_batch_size=12,
        train_num_steps=24,
        gradient_accumulate_every=2,
        save_and_sample_every=8,
        num_samples=4,
    )
    trainer.train()


if __name__ == "__main__":
    main()

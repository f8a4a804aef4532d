"""The programs of the second part of the ninth round of silent faults: images, video and scenes,
and how each is started on CPU ranks. They run unmodified but for the edits here, which remove GPUs,
downloads and size, print the loss, and let IP-Adapter clip. None is repaired."""

from __future__ import annotations

import json
from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ------------------------------------------------------------------------ LlamaGen, ce98ec4

_LLAMAGEN, _LLAMAGEN_GPT = "autoregressive/train/train_c2i_fsdp.py", "autoregressive/models/gpt.py"
_LLAMAGEN_DATA = "dataset/imagenet.py"


def _for_llamagen(folder: Path) -> None:
    write(folder, {"imagenet256_codes/README": "", "imagenet256_labels/README": ""})


_LLAMAGEN_PROGRAM = Program(
    "llamagen", "LlamaGen", _LLAMAGEN,
    ("--code-path=.", "--cloud-save-path=out", "--gpt-model=GPT-B", "--vocab-size=64",
     "--num-classes=8", "--epochs=2", "--lr=1e-3", "--global-batch-size=8", "--num-workers=0",
     "--log-every=2", "--mixed-precision=fp32", "--no-wandb"),
    needs=("numpy", "PIL", "wandb"), prints=r"loss [0-9.]+", env=(("PYTHONPATH", "."),),
    prepare=beside(_LLAMAGEN, "torchvision", data=_for_llamagen),
    adapt=(
        *imports_on_cpu(_LLAMAGEN),
        *on_cpu(
            _LLAMAGEN,
            ("assert torch.cuda.is_available()", "pass"),
            ("device = global_rank % torch.cuda", 'device = torch.device("cpu")'),
            ("latent_size = args.image_size //", "latent_size = 4"),
            # What `sync_module_states` does on GPUs only.
            ("model = FSDP(", "for value in model.state_dict().values():\n"
             "    dist.broadcast(value, 0)\n{line}"),
            ("sync_module_states=True", ""),
            ("log_steps += 1", "{line}\nprint(f'loss {loss.item():.6f}', flush=True)"),
        ),
        *on_cpu(
            _LLAMAGEN_GPT,
            ("return Transformer(ModelArgs(n_layer=12", "return Transformer(ModelArgs("
             "n_layer=2, n_head=2, dim=32, multiple_of=16, **kwargs))"),
        ),
        # Codes of an image follow from its number.
        *on_cpu(
            _LLAMAGEN_DATA,
            ("self.feature_files = [f", 'self.feature_files = [f"{i}.npy" for i in range(48)]'),
            ("self.label_files = [f", 'self.label_files = [f"{i}.npy" for i in range(48)]'),
            ("features = np.load(",
             "features = (np.arange(16) * (1 + idx % 5) + idx * 7)[None] % 64"),
            ("labels = np.load(", "labels = np.array([idx % 8])"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ IP-Adapter, 62e4af9

_IP = "tutorial_train.py"
_IP_LETTERS = ("!", "a", "b", "c", "d", "e", "!</w>", "a</w>", "b</w>", "c</w>", "d</w>", "e</w>")
# What would be read from a pretrained model, in evaluation mode as then.
_IP_TEXT = (
    "text_encoder = CLIPTextModel(CLIPTextConfig(\n"
    "    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,\n"
    "    num_attention_heads=2, max_position_embeddings=12, bos_token_id=12, eos_token_id=13,\n"
    ")).eval()"
)
_IP_VAE = (
    "vae = AutoencoderKL(\n"
    "    down_block_types=('DownEncoderBlock2D',) * 2, up_block_types=('UpDecoderBlock2D',) * 2,\n"
    "    block_out_channels=(8, 16), norm_num_groups=4,\n"
    ").eval()"
)
_IP_UNET = (
    "unet = UNet2DConditionModel(\n"
    "    sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,\n"
    "    down_block_types=('DownBlock2D', 'CrossAttnDownBlock2D'), cross_attention_dim=16,\n"
    "    up_block_types=('CrossAttnUpBlock2D', 'UpBlock2D'), attention_head_dim=8,\n"
    ").eval()"
)
_IP_IMAGES = (
    "image_encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(\n"
    "    hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=1,\n"
    "    num_attention_heads=2, image_size=16, patch_size=8,\n"
    ")).eval()"
)


def _for_ip_adapter(folder: Path) -> None:
    rows = [
        {"image_file": f"{n}.png", "text": "abcde"[n % 5 :] + " " + "edcba"[n % 3 :]}
        for n in range(48)
    ]
    words = [*_IP_LETTERS, "<|startoftext|>", "<|endoftext|>"]
    write(folder, {"data.json": json.dumps(rows)})
    (folder / "tiny").mkdir()
    write(folder, {
        "tiny/tokenizer/vocab.json": json.dumps({word: n for n, word in enumerate(words)}),
        "tiny/tokenizer/merges.txt": "#version: 0.2\n",
        "tiny/tokenizer/tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer", '
                                                '"model_max_length": 12}',
    })  # fmt: skip


_IP_ADAPTER = Program(
    "ip-adapter", "IP-Adapter", _IP,
    ("--pretrained_model_name_or_path=tiny", "--image_encoder_path=tiny", "--data_root_path=.",
     "--data_json_file=data.json", "--resolution=16", "--train_batch_size=4",
     "--num_train_epochs=2", "--learning_rate=1e-3", "--output_dir=out"),
    needs=("accelerate", "diffusers", "einops", "PIL", "tensorboard", "transformers"),
    prints=r"step_loss: [0-9.]+", prepare=beside(_IP, data=_for_ip_adapter),
    env=(("ACCELERATE_USE_CPU", "true"),),
    adapt=(
        *on_cpu(
            "ip_adapter/ip_adapter.py",
            ("from diffusers import StableDiffusionPipeline", "StableDiffusionPipeline = object"),
            ("from diffusers.pipelines.controlnet", "MultiControlNetModel = ()"),
        ),
        *imports_on_cpu(_IP, "import random"),
        *on_cpu(
            _IP,
            ("from transformers import CLIPTextModel", "from transformers import (\n"
             "    CLIPTextConfig, CLIPTextModel, CLIPTokenizer, CLIPVisionConfig,\n"
             "    CLIPVisionModelWithProjection,\n)"),
            ("from transformers import CLIPImageProcessor", ""),
            ("from torchvision import transforms",
             "from unittest.mock import MagicMock\ntransforms = MagicMock()"),
            ("self.clip_image_processor = CLIPImageProcessor()", ""),
            ("noise_scheduler = DDPMScheduler", "noise_scheduler = DDPMScheduler()"),
            ("text_encoder = CLIPTextModel.from", _IP_TEXT),
            ("vae = AutoencoderKL.from", _IP_VAE),
            ("unet = UNet2DConditionModel.from", _IP_UNET),
            ("image_encoder = CLIPVisionModelWithProjection.from", _IP_IMAGES),
            ("raw_image = Image.open(", 'raw_image = Image.linear_gradient("L").resize((16, 16))'
             '.rotate(37 * idx).convert("RGB")'),
            ("image = self.transform(", "image = torch.frombuffer(bytearray(raw_image.tobytes()), "
             "dtype=torch.uint8)\nimage = image.view(16, 16, 3).permute(2, 0, 1) / 127.5 - 1"),
            ("clip_image = self.clip_image_processor(", "clip_image = image[None]"),
            # Ranks draw other noise, as where nothing is seeded.
            ("# dataloader", "random.seed(7 + accelerator.process_index)\n"
             "torch.manual_seed(7 + accelerator.process_index)"),
            # Training scripts of diffusers clip, too.
            ("params_to_opt = itertools.chain(", "params_to_opt = list(itertools.chain("
             "ip_adapter.image_proj_model.parameters(), ip_adapter.adapter_modules.parameters()))"),
            ("accelerator.backward(loss)", "{line}\n"
             "accelerator.clip_grad_norm_(params_to_opt, 0.01)"),
        ),
    ),
)  # fmt: skip

NINTH_SILENT_B_PROGRAMS = (_LLAMAGEN_PROGRAM, _IP_ADAPTER)

"""The command line: precedence, types, errors that name the value and the remedy."""

import dataclasses

import pytest

from config import REFUSED, Config, configure, option_comments, parse_command_line


def test_command_line_beats_task_beats_default():
    config, task = configure(["--learning_rate", "3e-5", "--digits", "2"])
    assert config.learning_rate == 3e-5  # the task says 2e-5, the default is 1e-6
    assert config.max_completion_length == 16  # the task's
    assert config.epsilon == 0.2  # the default
    assert task.options.digits == 2


def test_values_take_their_fields_type():
    config, _ = configure(
        [
            "--score_centering",
            "false",
            "--max_steps=7",
            "--epsilon_high",
            "0.28",
            "--trust-remote-code",
        ]
        + ["--chat_template_kwargs", '{"enable_thinking": false}', "--token_budget", "none"]
    )
    assert config.score_centering is False and config.max_steps == 7
    assert config.epsilon_high == 0.28 and config.trust_remote_code is True
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.token_budget is None


def test_a_negative_number_is_a_value():
    assert parse_command_line(["--max_steps", "-1", "--bf16"]) == {
        "max_steps": "-1",
        "bf16": "true",
    }


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--learning_rat", "1"], ["unknown option --learning_rat", "--learning_rate"]),
        (["--deepspeed", "x.json"], ["--deepspeed", "FSDP2"]),
        (["--use_liger_kernel", "true"], ["--use_liger_kernel"]),
        (["learning_rate"], ["'learning_rate'", "--learning_rate 1e-5"]),
        (["--learning_rate", "fast"], ["--learning_rate 'fast'", "float"]),
        (["--score_centering", "maybe"], ["--score_centering 'maybe'", "true or false"]),
        (["--chat_template_kwargs", "[1]"], ["--chat_template_kwargs '[1]'", "JSON object"]),
        (["--num_generations", "1"], ["--num_generations 1", "baseline"]),
        (["--temperature", "0"], ["--temperature 0.0", "positive"]),
        (["--top_p", "0.9"], ["--top_p", "--top_k"]),
        (["--min_p", "0.1"], ["--min_p", "--top_k"]),
        (["--loss", "gspo"], ["--epsilon 0.2", "--epsilon 3e-4"]),
        (["--loss", "ppo"], ["--loss 'ppo'", "cispo"]),
        (["--num_sampler_logprobs", "0"], ["--num_sampler_logprobs 0", "--score_centering false"]),
        (["--max_steps", "-1", "--lr_scheduler_type", "cosine"], ["cosine", "--max_steps"]),
        (["--vllm_importance_sampling_clip_min", "6"], ["clip_min 6.0", "clip_max=5.0"]),
        (["--env", "no_such_task"], ["no_such_task", "arithmetic"]),
        (["--token_budget", "1"], ["--token_budget 1", "at least 2"]),
    ],
)
def test_mistakes_name_the_value_and_the_remedy(argv, words):
    with pytest.raises(ValueError) as error:
        configure(argv)
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


def test_every_option_has_its_sentence_and_is_not_refused():
    names = {field.name for field in dataclasses.fields(Config)}
    assert option_comments(Config).keys() == names
    assert not names & REFUSED.keys()


def test_defaults_are_the_specs():
    # spec, 'Parameters that control ...': where it names a default, it is ours
    expected = {
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "num_generations": 8,
        "max_completion_length": 2048,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "vllm_server_base_url": "http://localhost:8000",
        "vllm_server_timeout": 1800.0,
        "epsilon": 0.2,
        "epsilon_high": None,
        "score_centering": True,
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 5.0,
        "num_sampler_logprobs": 8,
        "token_budget": None,
        "max_concurrent_rollouts": 512,
        "max_staleness": 4,
        "weight_sync_steps": 1,
        "rollout_worker_timeout": 300.0,
        "gradient_checkpointing": "auto",  # the specification's true where memory asks for it
        "logging_steps": 1,
        "num_train_epochs": 3.0,
        "max_steps": -1,
        "dtype": "float32",
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "seed": 42,
        "ddp_timeout": 1800,
        "gradient_accumulation_steps": 1,
        "trust_remote_code": False,
    }
    default = Config()
    assert {name: getattr(default, name) for name in expected} == expected

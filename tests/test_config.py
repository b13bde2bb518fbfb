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
        (["--dtype", "float16"], ["--dtype 'float16'", "--fp16 true"]),
        (["--model_init_kwargs", '{"dtype": "float16"}'], ["--dtype 'float16'", "--fp16 true"]),
        (["--report_to", "mlflow"], ["--report_to 'mlflow'", "wandb"]),
        (["--vllm_server_base_url", "localhost:8000"], ["'localhost:8000'", "http://localhost"]),
        (["--vllm_server_base_url", "http://a:1,"], ["'http://a:1,'", "commas"]),
        (["--epsilon_high", "-0.1"], ["--epsilon_high -0.1", "negative"]),
        (["--router_aux_loss_coef", "-1"], ["--router_aux_loss_coef -1.0", "negative"]),
        (["--seed", "-1"], ["--seed -1", "negative"]),
        (["--max_grad_norm", "-1"], ["--max_grad_norm -1.0", "negative"]),
        (["--warmup_steps", "-2"], ["--warmup_steps -2.0", "negative"]),
        (["--warmup_steps", "2"], ["--warmup_steps 2.0", "constant_with_warmup"]),
        (["--max_steps", "-1", "--save_steps", "0.5"], ["--save_steps 0.5", "--max_steps"]),
        (["--fp16", "true", "--bf16", "true"], ["--fp16 True", "--bf16 true"]),
        (["--adam_beta2", "1"], ["--adam_beta2 1.0", "[0, 1)"]),
        (["--adam_epsilon", "0"], ["--adam_epsilon 0.0", "positive"]),
        (["--ddp_timeout", "0"], ["--ddp_timeout 0", "positive"]),
        (["--num_train_processes", "0"], ["--num_train_processes 0", "at least 1"]),
        (["--lora_r", "4", "--lora_alpha", "0"], ["--lora_alpha 0", "at least 1"]),
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
        "save_strategy": "steps",
        "save_steps": 500,
        "fp16": False,
        "push_to_hub": False,
        "hub_strategy": "every_save",
        "train_sampling_strategy": "random",
        "log_completions": False,
        **dict.fromkeys(
            "output_dir run_name bf16 tf32 disable_tqdm data_seed save_total_limit hub_model_id "
            "hub_private_repo hub_revision resume_from_checkpoint model_init_kwargs "
            "router_aux_loss_coef chat_template_kwargs max_tool_calling_iterations "
            "num_completions_to_print".split()
        ),
    }
    default = Config()
    assert {name: getattr(default, name) for name in expected} == expected


SPEC_OPTIONS = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon optim_target_modules gradient_accumulation_steps
    average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
    fp16_full_eval tf32 gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
    neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy
    logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name
    project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
    eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
    hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed
    use_cpu accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed
    debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
    model_init_kwargs dtype trust_remote_code router_aux_loss_coef num_generations
    max_completion_length temperature top_p top_k min_p chat_template_kwargs
    max_tool_calling_iterations vllm_server_base_url vllm_server_timeout epsilon epsilon_high
    score_centering vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max
    num_sampler_logprobs token_budget max_concurrent_rollouts max_staleness weight_sync_steps
    rollout_worker_timeout log_completions num_completions_to_print
""".split()


def test_every_option_of_the_specification_exists_or_is_refused_with_a_reason():
    fields = {field.name for field in dataclasses.fields(Config)}
    missing = [name for name in SPEC_OPTIONS if (name in fields) == (name in REFUSED)]
    assert len(SPEC_OPTIONS) == 139 and not missing
    assert all(REFUSED.values())

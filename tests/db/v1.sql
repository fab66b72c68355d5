-- The tables of schema version 1, as autotax made them.
CREATE TABLE autotax_meta (
	name VARCHAR(64) NOT NULL,
	value TEXT NOT NULL,
	CONSTRAINT pk_autotax_meta PRIMARY KEY (name)
);
CREATE TABLE autotax_hardware (
	digest VARCHAR(16) NOT NULL,
	backend VARCHAR(16) NOT NULL,
	device TEXT NOT NULL,
	target VARCHAR(64) NOT NULL,
	count INTEGER NOT NULL,
	memory_gib INTEGER NOT NULL,
	processors INTEGER NOT NULL,
	shared_memory BIGINT NOT NULL,
	l2_bytes BIGINT NOT NULL,
	links TEXT NOT NULL,
	CONSTRAINT pk_autotax_hardware PRIMARY KEY (digest)
);
CREATE TABLE autotax_environment (
	digest VARCHAR(16) NOT NULL,
	python VARCHAR(64) NOT NULL,
	torch VARCHAR(64) NOT NULL,
	triton VARCHAR(64) NOT NULL,
	comm VARCHAR(200) NOT NULL,
	kernels VARCHAR(16) NOT NULL,
	CONSTRAINT pk_autotax_environment PRIMARY KEY (digest)
);
CREATE INDEX ix_autotax_environment_kernels ON autotax_environment (kernels);
CREATE TABLE autotax_problem (
	"key" VARCHAR(200) NOT NULL,
	op VARCHAR(64) NOT NULL,
	fields JSON NOT NULL,
	CONSTRAINT pk_autotax_problem PRIMARY KEY ("key")
);
CREATE INDEX ix_autotax_problem_op ON autotax_problem (op);
CREATE TABLE autotax_run (
	id {SERIAL} NOT NULL,
	problem_key VARCHAR(200) NOT NULL,
	hardware_digest VARCHAR(16) NOT NULL,
	environment_digest VARCHAR(16) NOT NULL,
	settings JSON NOT NULL,
	status VARCHAR(16) NOT NULL,
	started_at {MOMENT} NOT NULL,
	ended_at {MOMENT},
	CONSTRAINT pk_autotax_run PRIMARY KEY (id),
	CONSTRAINT ck_autotax_run_status_known CHECK (status IN ('running', 'done', 'interrupted', 'failed')),
	CONSTRAINT fk_autotax_run_problem_key FOREIGN KEY(problem_key) REFERENCES autotax_problem ("key"),
	CONSTRAINT fk_autotax_run_hardware_digest FOREIGN KEY(hardware_digest) REFERENCES autotax_hardware (digest),
	CONSTRAINT fk_autotax_run_environment_digest FOREIGN KEY(environment_digest) REFERENCES autotax_environment (digest)
);
CREATE INDEX ix_autotax_run_problem_key ON autotax_run (problem_key);
CREATE TABLE autotax_trial (
	id {SERIAL} NOT NULL,
	run_id INTEGER NOT NULL,
	number INTEGER NOT NULL,
	variant VARCHAR(64) NOT NULL,
	config JSON NOT NULL,
	config_digest VARCHAR(16) NOT NULL,
	status VARCHAR(32) NOT NULL,
	latency_us {REAL},
	samples JSON,
	slowest_rank INTEGER,
	compile_s {REAL},
	verified BOOLEAN NOT NULL,
	relative_error {REAL},
	error TEXT,
	conditions JSON NOT NULL,
	created_at {MOMENT} NOT NULL,
	CONSTRAINT pk_autotax_trial PRIMARY KEY (id),
	CONSTRAINT ck_autotax_trial_status_known CHECK (status IN ('ok', 'pruned', 'infeasible', 'compile_error', 'out_of_resources', 'wrong_result', 'hang', 'crash')),
	CONSTRAINT ck_autotax_trial_ok_is_timed CHECK (status <> 'ok' OR latency_us IS NOT NULL),
	CONSTRAINT fk_autotax_trial_run_id FOREIGN KEY(run_id) REFERENCES autotax_run (id)
);
CREATE INDEX ix_autotax_trial_config_digest ON autotax_trial (config_digest);
CREATE INDEX ix_autotax_trial_run_id_number ON autotax_trial (run_id, number);
CREATE TABLE autotax_winner (
	problem_key VARCHAR(200) NOT NULL,
	hardware_digest VARCHAR(16) NOT NULL,
	kernel_digest VARCHAR(16) NOT NULL,
	world_size INTEGER NOT NULL,
	comm VARCHAR(200) NOT NULL,
	environment_digest VARCHAR(16) NOT NULL,
	trial_id INTEGER NOT NULL,
	config JSON NOT NULL,
	latency_us {REAL} NOT NULL,
	baseline_us {REAL} NOT NULL,
	baseline JSON NOT NULL,
	speedup {REAL} NOT NULL,
	interval_low {REAL} NOT NULL,
	interval_high {REAL} NOT NULL,
	tie BOOLEAN NOT NULL,
	verified BOOLEAN NOT NULL,
	samples JSON,
	created_at {MOMENT} NOT NULL,
	CONSTRAINT pk_autotax_winner PRIMARY KEY (problem_key, hardware_digest, kernel_digest, world_size, comm),
	CONSTRAINT ck_autotax_winner_verified CHECK (verified),
	CONSTRAINT fk_autotax_winner_problem_key FOREIGN KEY(problem_key) REFERENCES autotax_problem ("key"),
	CONSTRAINT fk_autotax_winner_hardware_digest FOREIGN KEY(hardware_digest) REFERENCES autotax_hardware (digest),
	CONSTRAINT fk_autotax_winner_environment_digest FOREIGN KEY(environment_digest) REFERENCES autotax_environment (digest),
	CONSTRAINT fk_autotax_winner_trial_id FOREIGN KEY(trial_id) REFERENCES autotax_trial (id)
);
CREATE INDEX ix_autotax_winner_trial_id ON autotax_winner (trial_id);
INSERT INTO autotax_meta VALUES ('schema_version', '1');
